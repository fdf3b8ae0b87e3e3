"""Whatever goes wrong on one rank by our doing is named on every rank before the process group's timeout.

Each case is a training of two ranks over gloo, where a rank that is done goes on to live: nobody is woken by its end.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from ranks.cases import MODES
from ranks.launch import TIMEOUT, Outcome, run_ranks

REFUSED = {"budget": "200KiB", "other_rows": [256]}
NEW_SHAPE = {"budget": "200KiB", "other_rows": [64, 256]}
long = pytest.mark.long


@functools.cache
def _eager(**arguments: Any) -> list[str]:
    found = run_ranks("train", fitted=False, **{name: _list(value) for name, value in arguments.items()})
    assert not any(each.error for each in found), found
    return [each.found["bits"] for each in found]


def _list(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def trains(ranks: int = 2, **arguments: Any) -> list[Outcome]:
    """The outcomes of a case that trains with eager's bits."""
    found = run_ranks("train", ranks, **arguments)
    assert [each.error for each in found] == [""] * ranks, found
    same = {name: value for name, value in arguments.items() if name in ("mode", "rows", "other_rows", "parts", "who")}
    same |= {name: value for name, value in arguments.items() if name in ("adam", "buffers")}
    eager = _eager(ranks=ranks, **{k: tuple(v) if isinstance(v, list) else v for k, v in same.items()})
    assert [each.found["bits"] for each in found] == eager
    return found


def named(kind: str, *, other: str = "", text: str = "rank 1", who: int = 1, ranks: int = 2, **arguments: Any) -> None:
    """Hold a case against an error on every rank: of ``kind``, on rank ``who`` of ``other``; others name that rank."""
    found = run_ranks("train", ranks, who=who, **arguments)
    for rank, each in enumerate(found):
        assert each.error == (other or kind if rank == who else kind), found
        assert rank == who or text in each.text, found
        assert each.error == "ended" or each.seconds < TIMEOUT.total_seconds() + 15, found  # capturing takes a part


def test_a_refusal_before_the_first_step_is_raised_on_all_and_the_loop_may_go_on() -> None:
    found = trains(**REFUSED, again="800KiB")
    assert [each.found["caught"][0].split(":")[0] for each in found] == ["BudgetError"] * 2
    assert "rank 1: Ask for" in found[0].found["caught"][0]


def test_a_new_shape_that_is_refused_on_one_rank_is_named_on_all() -> None:
    named("BudgetError", **NEW_SHAPE)


def test_an_error_in_the_first_backward_of_a_static_graph_is_named_on_all() -> None:
    named("VerificationError", fault="verification", mode="static")


def test_a_step_over_its_budget_is_named_on_ranks_that_exchange_buffers() -> None:
    named("BudgetExceeded", fault="exceeded", buffers=True, mode="views")


def test_a_rank_that_is_interrupted_is_named() -> None:
    named("RankError", other="KeyboardInterrupt", text="rank 1 was interrupted", fault="interrupted")


def test_who_holds_the_store_may_end_while_planning() -> None:
    named("RankError", other="ended", text="store of the process group cannot be reached", fault="killed", who=0)


def test_a_rank_that_plans_alone_is_waited_for() -> None:
    trains(fault="slow", at=1, rows=[64, 32])


@pytest.mark.parametrize(
    ("what", "arguments"),
    [("budget", {"other_budget": "75%"}), ("version of Ebbtide", {"fault": "another version", "at": 9})],
)
def test_ranks_that_differ_are_refused_before_anything_runs(what: str, arguments: dict[str, Any]) -> None:
    named("UsageError", text=f"their {what} differs", **arguments)


# -- all modes, four ranks, and every fault ------------------------------------------------------------------------


@long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", ["verification", "tier", "interrupted in backward"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_errors_in_backwards(mode: str, fault: str, at: int) -> None:
    kinds = {"verification": "VerificationError", "tier": "TierError", "interrupted in backward": "RankError"}
    other = "KeyboardInterrupt" if fault.startswith("interrupted") else ""
    named(kinds[fault], other=other, fault=fault, at=at, mode=mode)


@long
@pytest.mark.parametrize("at", [2, 3])
def test_errors_in_accumulated_backwards(at: int) -> None:
    named("VerificationError", fault="verification", at=at, parts=2)


@long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arguments", [REFUSED, NEW_SHAPE, {"fault": "exceeded"}], ids=["first", "shape", "exceeded"])
def test_four_ranks(mode: str, arguments: dict[str, Any]) -> None:
    kind = "BudgetExceeded" if "fault" in arguments else "BudgetError"
    named(kind, ranks=4, mode=mode, who=2, text="rank 2", **arguments)


@long
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("fault", ["killed", "segfault"])
def test_ranks_that_end_while_planning(fault: str, who: int) -> None:
    text = "store of the process group" if who == 0 else "rank 1 has ended or hangs"
    named("RankError", other="ended", text=text, fault=fault, who=who)


@long
def test_a_rank_that_is_later_than_the_timeout_trains() -> None:
    trains(fault="late")


@long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alone", ["set_budget", "no_grad", "unfit"])
def test_what_one_rank_does_alone(mode: str, alone: str) -> None:
    trains(alone=alone, at=1, mode=mode)

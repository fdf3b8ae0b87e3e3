"""What may leave ranks waiting for one another, each with what has to come of it: an error on all, or a training."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from rank_cases.launch import Outcome, run_ranks

__all__ = ["HAZARDS", "Hazard", "Judged", "judge"]

_OF_EAGER = ("rows", "other_rows", "parts", "adam", "buffers", "alone", "at", "steps", "around", "pairs")


@dataclass(frozen=True)
class Hazard:
    """One of them.

    Attributes:
        name: in words.
        arguments: of ``cases.train``.
        kind: class of the error of all ranks; empty if they train with the bits of a wrapper without Ebbtide.
        own: of rank ``who``, if it is another there.
        text: in the error of the others, with ``{}`` for the rank.
        who: the rank that is another; ``None`` is the last.
        modes: whether it may be another in each mode of the wrapper: what is before any exchange is not.
        alike: whether all ranks have an error of the same moment, and none has ended.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    kind: str = ""
    own: str = ""
    text: str = "rank {}"
    who: int | None = None
    modes: bool = False

    def is_tried_in(self, mode: str) -> bool:
        """Whether it is one in ``mode``: torch's own ``static_graph`` fails if its first backward is in ``no_sync``."""
        return mode == "plain" or (self.modes and not (mode == "static" and "parts" in self.arguments))

    @property
    def alike(self) -> bool:
        """Whether all ranks live and raise together."""
        return bool(self.kind) and self.own != "ended"


_REFUSED = {"budget": "200KiB", "other_rows": [256]}
_SHAPE = {"budget": "200KiB", "other_rows": [64, 256]}
_LATER = {"budget": "200KiB", "other_rows": [64, 64, 256], "at": 1}
_STORE = "store of the process group cannot be reached"
_INTERRUPTED = "rank {} was interrupted"

HAZARDS = (
    Hazard("refused at the first call", _REFUSED, "BudgetError", modes=True),
    Hazard("refused at the first call, and the loop goes on", {**_REFUSED, "again": "800KiB"}, modes=True),
    Hazard("a new shape is refused", _SHAPE, "BudgetError", modes=True),
    Hazard("a new shape is refused, with buffers", {**_SHAPE, "buffers": True}, "BudgetError", modes=True),
    Hazard("the optimizer's state is refused", {"budget": "176KiB", "adam": True}, "BudgetError", modes=True),
    Hazard("two forwards to a backward", {"pairs": True}, modes=True),
    Hazard("two forwards to a backward, refused", {**_SHAPE, "pairs": True}, "BudgetError", modes=True),
    Hazard("a part of the wrapped module", {"around": True}, modes=True),
    Hazard("a part of the wrapped module, refused", {**_SHAPE, "around": True}, "BudgetError", modes=True),
    Hazard("evaluates alone, then is refused", {**_LATER, "alone": "evaluates"}, "BudgetError", modes=True),
    Hazard("rank 0 evaluates alone, then is refused", {**_LATER, "alone": "evaluates"}, "BudgetError", who=0),
    Hazard("drops a graph alone, then is refused", {**_LATER, "alone": "drops a graph"}, "BudgetError", modes=True),
    Hazard("sums more alone, then is refused", {**_LATER, "alone": "sums more"}, "BudgetError", modes=True),
    Hazard("plans 40 s, and the group waits for 15 s", {"fault": "late"}),
    Hazard("plans another shape alone", {"fault": "slow", "at": 1, "rows": [64, 32]}),
    Hazard("other costs", {"fault": "skewed costs", "at": 1, "budget": "85%"}, modes=True),
    Hazard("budgets of bytes a little apart", {"budget": "700KiB", "other_budget": "690KiB"}),
    Hazard("other residents", {"held_bytes": 100_000, "budget": "95%"}),
    Hazard("another batch shape", {"other_rows": [64, 48]}, modes=True),
    Hazard("another branch", {"alone": "branch", "at": 1}, modes=True),
    Hazard("a step over its budget", {"fault": "exceeded"}, "BudgetExceeded", modes=True),
    Hazard("the same, with buffers", {"fault": "exceeded", "buffers": True}, "BudgetExceeded", modes=True),
    Hazard("other bits in the first backward", {"fault": "verification"}, "VerificationError", modes=True),
    Hazard("other bits later", {"fault": "verification", "at": 2}, "VerificationError", modes=True),
    Hazard("other bits in no_sync", {"fault": "verification", "at": 2, "parts": 2}, "VerificationError", modes=True),
    Hazard("other bits after no_sync", {"fault": "verification", "at": 3, "parts": 2}, "VerificationError", modes=True),
    Hazard("a tier fails", {"fault": "tier", "at": 1}, "TierError", modes=True),
    Hazard("set_budget alone", {"alone": "set_budget", "at": 1}, modes=True),
    Hazard("unfit alone", {"alone": "unfit", "at": 1}, modes=True),
    Hazard("accumulates alone", {"alone": "accumulates", "at": 1}, modes=True),
    Hazard("no_grad alone", {"alone": "no_grad", "at": 1}),
    Hazard(
        "SIGKILL before the first call", {"fault": "killed before"}, "RankError", "ended", "rank {} has ended or hangs"
    ),
    Hazard("SIGKILL while planning", {"fault": "killed"}, "RankError", "ended"),
    Hazard("SIGKILL of rank 0 while planning", {"fault": "killed"}, "RankError", "ended", _STORE, who=0),
    Hazard("SIGSEGV while planning", {"fault": "segfault"}, "RankError", "ended"),
    Hazard("SIGSEGV of rank 0 while planning", {"fault": "segfault"}, "RankError", "ended", _STORE, who=0),
    Hazard("Ctrl-C while planning", {"fault": "interrupted"}, "RankError", "KeyboardInterrupt", _INTERRUPTED),
    Hazard(
        "Ctrl-C while waiting at the store",
        {"fault": "interrupted at the store", "others_fault": "slow"},
        "RankError",
        "KeyboardInterrupt",
        _INTERRUPTED,
        who=0,
    ),
    Hazard(
        "Ctrl-C in a backward",
        {"fault": "interrupted in backward", "at": 1},
        "RankError",
        "KeyboardInterrupt",
        _INTERRUPTED,
        modes=True,
    ),
    Hazard("other budgets", {"other_budget": "75%"}, "UsageError", text="their budget differs"),
    Hazard("another model", {"another_model": True}, "UsageError", text="their model differs"),
    Hazard("another version", {"fault": "another version"}, "UsageError", text="their version of Ebbtide differs"),
    Hazard("no store", {"fault": "no store", "others_fault": "no store"}, "RankError", text=_STORE),
)


@dataclass(frozen=True)
class Judged:
    """What came of a hazard.

    Attributes:
        outcomes: of the ranks.
        wrong: what is not as it has to be; empty if all is.
        apart_seconds: between the errors of the first and the last rank; ``None`` where not all have one.
    """

    outcomes: list[Outcome]
    wrong: str
    apart_seconds: float | None


def judge(hazard: Hazard, mode: str, ranks: int) -> Judged:
    """Run it, and hold what comes of it against what has to."""
    who = ranks - 1 if hazard.who is None else hazard.who
    outcomes = run_ranks("train", ranks, mode=mode, who=who, **hazard.arguments)
    seconds = [each.seconds for each in outcomes]
    apart = max(seconds) - min(seconds) if hazard.alike else None
    return Judged(outcomes, _wrong(hazard, outcomes, mode, who), apart)


def _wrong(hazard: Hazard, outcomes: list[Outcome], mode: str, who: int) -> str:
    for rank, each in enumerate(outcomes):
        wanted = hazard.own or hazard.kind if rank == who else hazard.kind
        if each.error != wanted:
            return f"rank {rank}: {each.error or 'trains'} instead of {wanted or 'training'}: {each.text[-1500:]}"
        if rank != who and hazard.kind and hazard.text.format(who) not in each.text:
            return f"rank {rank} says: {each.text}"
    if hazard.kind:
        return ""
    same = {name: _hashable(value) for name, value in hazard.arguments.items() if name in _OF_EAGER}
    eager = _eager(mode, len(outcomes), who, tuple(sorted(same.items())))
    own = tuple(each.found["bits"] for each in outcomes)
    return "" if own == eager else f"other bits: {own} instead of {eager}"


@functools.cache
def _eager(mode: str, ranks: int, who: int, arguments: tuple[tuple[str, Any], ...]) -> tuple[str, ...]:
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in arguments}
    found = run_ranks("train", ranks, mode=mode, who=who, fitted=False, **given)
    assert not any(each.error for each in found), found
    return tuple(each.found["bits"] for each in found)


def _hashable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value

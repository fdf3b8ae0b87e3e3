"""One base for all errors, and built-in bases, so that users can catch either."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from ebbtide import errors
from ebbtide.errors import (
    BudgetError,
    BudgetExceeded,
    CaptureError,
    EbbtideError,
    InternalError,
    PlanFileError,
    PlanMismatch,
    RankError,
    TierError,
    UnknownArgument,
    UpdateError,
    UsageError,
    VerificationError,
)
from ebbtide.lower.proof import ProofError
from ebbtide.planners import planner_named
from ebbtide.step.machine import machine_named
from ebbtide.zoo import build


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_the_common_base_and_a_docstring(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, EbbtideError)
    assert kind.__doc__


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("UsageError", ValueError),
        ("UnknownArgument", TypeError),
        ("BudgetError", ValueError),
        ("PlanMismatch", ValueError),
        ("PlanFileError", ValueError),
        ("BudgetExceeded", RuntimeError),
        ("CaptureError", RuntimeError),
        ("TierError", RuntimeError),
        ("RankError", RuntimeError),
        ("VerificationError", RuntimeError),
        ("InternalError", RuntimeError),
    ],
)
def test_errors_are_also_of_a_builtin_kind(name: str, base: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), base)


def test_a_budget_error_carries_the_way_out() -> None:
    error = BudgetError(
        "too small", budget_bytes=1, floor_bytes=2, smallest_bytes=3, resident_bytes=4, pinned_by="mm at net.py:3"
    )
    assert str(error) == "too small"
    assert (error.budget_bytes, error.floor_bytes, error.smallest_bytes) == (1, 2, 3)
    assert (error.resident_bytes, error.pinned_by) == (4, "mm at net.py:3")


ERRORS = [
    UsageError("no such planner", argument="planner", value="x", accepted=["auto"]),
    UnknownArgument("no such argument", argument="tier", value="disk", accepted=["tiers"]),
    BudgetError("small", budget_bytes=1, floor_bytes=2, smallest_bytes=3, resident_bytes=4, pinned_by="mm"),
    BudgetExceeded("over", budget_bytes=1, measured_peak_bytes=2, op="mm at net.py:3"),
    CaptureError("op x returns data", remedy="mask", op="x", source="net.py:3"),
    PlanMismatch("another program", differences=["torch: plan '2.11', here '2.13'"]),
    PlanFileError("damaged", path="plan.json"),
    TierError("full", tier="disk", path="/data"),
    VerificationError("other bits", buffer="mm", op="mm at net.py:3"),
    UpdateError("a gradient came late", updated=["head.weight"]),
    RankError("rank 1 has ended", rank=1),
    InternalError("a node claims nothing", op="mm at net.py:3"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_whole_from_another_process(error: EbbtideError) -> None:
    assert vars(error), "what it says is in attributes too"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_every_error_is_listed_above() -> None:
    assert {type(error) for error in ERRORS} == {getattr(errors, name) for name in errors.__all__} - {EbbtideError}


def test_a_capture_error_says_reason_and_remedy() -> None:
    assert str(CaptureError("op x returns data", remedy="mask")) == "Mask.\nWhy: op x returns data."
    assert str(CaptureError("op x returns data")) == "op x returns data"
    assert str(CaptureError("x", remedy="y", message="all of it")) == "all of it"


def test_a_fault_of_ours_says_so_and_what_to_report() -> None:
    error = InternalError("a node claims nothing", op="mm at net.py:3")
    for words in ("a node claims nothing", "mm at net.py:3", "fault in Ebbtide", "report", "python", "torch"):
        assert words in str(error)
    assert issubclass(ProofError, InternalError)


def test_an_exceeded_budget_carries_both_numbers() -> None:
    error = BudgetExceeded("over", budget_bytes=1, measured_peak_bytes=2)
    assert (error.budget_bytes, error.measured_peak_bytes) == (1, 2)


@pytest.mark.parametrize(
    ("asks", "name", "meant"),
    [(planner_named, "atuo", "auto"), (machine_named, "v100-16g", "v100-16gb"), (build, "resnet5", "resnet50")],
)
def test_a_misspelt_name_is_answered_with_the_nearest(asks: Callable[[str], object], name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{meant}'") as found:
        asks(name)
    assert found.value.value == name
    assert meant in found.value.accepted
    with pytest.raises(UsageError) as raised:
        asks("qqqq")
    assert "did you mean" not in str(raised.value)

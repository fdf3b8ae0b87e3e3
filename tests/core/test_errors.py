"""One base for all errors, and built-in bases, so that users can catch either."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ebbflow import errors
from ebbflow.errors import BudgetError, BudgetExceeded, EbbflowError, UsageError
from ebbflow.planners import planner_named
from ebbflow.step.machine import machine_named
from ebbflow.zoo import build


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_the_common_base_and_a_docstring(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, EbbflowError)
    assert kind.__doc__


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("UsageError", ValueError),
        ("BudgetError", ValueError),
        ("PlanMismatch", ValueError),
        ("PlanFileError", ValueError),
        ("BudgetExceeded", RuntimeError),
        ("CaptureError", RuntimeError),
        ("VerificationError", RuntimeError),
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


def test_an_exceeded_budget_carries_both_numbers() -> None:
    error = BudgetExceeded("over", budget_bytes=1, measured_peak_bytes=2)
    assert (error.budget_bytes, error.measured_peak_bytes) == (1, 2)


@pytest.mark.parametrize(
    ("asks", "name", "meant"),
    [(planner_named, "atuo", "auto"), (machine_named, "v100-16g", "v100-16gb"), (build, "resnet5", "resnet50")],
)
def test_a_misspelt_name_is_answered_with_the_nearest(asks: Callable[[str], object], name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        asks(name)
    with pytest.raises(UsageError) as raised:
        asks("qqqq")
    assert "did you mean" not in str(raised.value)

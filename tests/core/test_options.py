"""One record of options: every value that is none is refused when it is made, by name, with what would do."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from ebbtide.case import Case
from ebbtide.errors import UsageError
from ebbtide.options import DEFAULT_EFFORT, Options
from ebbtide.planners import Interrupt
from ebbtide.step.machine import machine_named

ABSURD: list[tuple[str, object]] = [
    ("planner", "atuo"),
    ("planner", None),
    ("planner", ["auto"]),
    ("effort", 0),
    ("effort", -1),
    ("effort", True),
    ("effort", 1.5),
    ("effort", "many"),
    ("effort", None),
    ("time_limit", float("nan")),
    ("time_limit", float("inf")),
    ("time_limit", -0.5),
    ("time_limit", True),
    ("time_limit", "1m"),
    ("seed", -1),
    ("seed", 2**31),
    ("seed", False),
    ("seed", 0.0),
    ("optimizer", "adamw"),
    ("optimizer", 3),
    ("loss", "mse"),
    ("loss", dict),
    ("machine", "a100"),
    ("machine", 80),
    ("gradients", "al"),
    ("gradients", True),
    ("progress", "loud"),
    ("verify", 1),
    ("verify", "yes"),
    ("on_violation", "stop"),
    ("on_violation", None),
    ("interrupt", True),
    ("start", "plan.json"),
    ("start", 5),
]


@pytest.mark.parametrize(("name", "value"), ABSURD)
def test_an_absurd_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name) as raised:
        Options(**{name: value})  # type: ignore[arg-type]
    assert raised.value.argument == name
    assert raised.value.value == value or value != value  # NaN
    assert raised.value.accepted, "what would do is said"


def test_near_names_are_offered() -> None:
    for name, value, meant in (
        ("planner", "atuo", "auto"),
        ("machine", "a100-80g", "a100-80gb"),
        ("gradients", "al", "all"),
    ):
        with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
            Options(**{name: value})  # type: ignore[arg-type]


def test_good_values_are_kept() -> None:
    interrupt = Interrupt()
    options = Options(
        planner="greedy",
        effort=np.int64(7),  # type: ignore[arg-type]
        time_limit=0,
        seed=2**31 - 1,
        machine="a100-80gb",
        gradients="all",
        interrupt=interrupt,
        progress=print,
        loss=abs,
        verify=False,
    )
    assert options.effort == 7
    assert options.target == machine_named("a100-80gb")
    assert options.every_output
    assert options.interrupt is interrupt
    assert Options(machine=machine_named("cpu")).target == machine_named("cpu")
    assert Options() == Options(planner="auto", effort=DEFAULT_EFFORT, gradients=None)
    assert not Options().every_output


def test_positional_options_and_changes_are_refused() -> None:
    with pytest.raises(TypeError):
        Options("auto")  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Options().effort = 3  # type: ignore[misc]


def test_a_case_says_what_the_call_leaves_open() -> None:
    case = Case(None, loss=abs, gradients="all")  # type: ignore[arg-type]
    assert Options().for_case(case) == Options(loss=abs, gradients="all")
    own = Options(loss=len, gradients="loss")
    assert own.for_case(case) == own
    with pytest.raises(UsageError, match="gradients"):
        Options().for_case(Case(None, gradients="some"))  # type: ignore[arg-type]


def test_options_are_checked_without_torch() -> None:
    code = (
        "import sys; from ebbtide.options import Options; Options(planner='greedy', machine='a100-80gb', effort=3); "
        "print(sorted({'torch', 'numpy', 'numba', 'ebbtide'}.intersection(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "['ebbtide']\n"

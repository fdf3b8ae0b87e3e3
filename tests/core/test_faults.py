"""Whose fault an exception is: told by the innermost frame that is neither torch's nor the standard library's."""

from __future__ import annotations

import json
import signal

import pytest

from ebbtide.errors import BudgetError, InternalError
from ebbtide.faults import in_own_frames, internal, is_own, own_faults
from ebbtide.planners.base import Progress, changes_to
from ebbtide.step.schedule import Schedule
from ebbtide.torch_seams.patches import Attribute, wrapped
from ebbtide.units import format_bytes


def caught(function: object, *arguments: object) -> Exception:
    try:
        function(*arguments)  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_what_our_code_raises_is_ours() -> None:
    assert is_own(caught(format_bytes, "a text"))
    assert is_own(caught(Schedule.from_json, [["nothing"]]))


def test_what_the_users_code_raises_is_theirs_also_below_ours() -> None:
    def broken(_: object) -> None:
        raise KeyError("mine")

    assert not is_own(caught(json.loads, "{"))
    assert not is_own(caught(changes_to(broken), Progress("planning")))


def test_what_a_patched_function_raises_is_not_of_its_patch() -> None:
    with wrapped(Attribute(json, "loads"), lambda below: lambda text: below(text)):
        assert not is_own(caught(json.loads, "{"))
    with wrapped(Attribute(json, "loads"), lambda below: lambda text: format_bytes(text)):
        assert is_own(caught(json.loads, "{"))


def test_a_fault_says_what_to_report() -> None:
    cause = caught(format_bytes, "a text")
    with pytest.raises(InternalError, match=r"TypeError.*fault in Ebbtide.*report") as raised, own_faults():
        raise cause
    assert raised.value.__cause__ is cause
    assert set(raised.value.versions) == {"python", "ebbtide", "torch"}
    for name, version in raised.value.versions.items():
        assert f"{name} {version}" in str(raised.value)
    assert "forward" not in str(raised.value), "never the advice to change the model"


@pytest.mark.parametrize("error", [KeyError("mine"), OSError("disk full"), KeyboardInterrupt()])
def test_what_is_no_fault_of_ours_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, own_faults():
        raise error
    assert raised.value is error


def test_errors_on_purpose_pass() -> None:
    error = BudgetError("small", budget_bytes=1, floor_bytes=2, smallest_bytes=3, resident_bytes=0, pinned_by="mm")
    with pytest.raises(BudgetError) as raised, own_faults():
        raise error
    assert raised.value is error


def test_own_frames_alone_are_left_of_a_traceback() -> None:
    error = caught(Schedule.from_json, [["nothing"]])
    trace, files = in_own_frames(error), []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    assert files
    assert all("/ebbtide/" in file and "test_" not in file for file in files)
    assert internal(error).what.startswith(type(error).__name__)


@pytest.mark.parametrize("kind", ["function", "method", "object"])
def test_what_a_signals_handler_raises_is_no_fault_of_ours(kind: str) -> None:
    """Also where it lies in a package that we call, as that for a dead worker of torch's DataLoader does."""
    names = {"__name__": "torch.somewhere"}
    source = (
        "def function(number, frame): raise RuntimeError('a worker died')\n"
        "class Handler:\n"
        "    def method(self, number, frame): raise RuntimeError('a worker died')\n"
        "    __call__ = method\n"
        "object = Handler()\n"
        "method = object.method\n"
    )
    exec(compile(source, "<torch>", "exec"), names)
    before = signal.signal(signal.SIGINT, names[kind])  # type: ignore[arg-type]
    try:
        with pytest.raises(RuntimeError, match="a worker died") as raised, own_faults():
            changes_to(signal.raise_signal)(signal.SIGINT)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, before)
    assert type(raised.value) is RuntimeError

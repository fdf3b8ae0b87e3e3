"""A first call that takes long says so: one line of the log, a bar on a terminal, nothing where that is asked for."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import threading
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine import loop
from ebbtide.engine.loop import CHANGED, FIRST, OTHER_WAY
from ebbtide.errors import BudgetError
from ebbtide.planners import Progress, narration
from ebbtide.units import format_bytes


class Terminal(io.StringIO):
    """A terminal, on which ``moved`` says that a bar was seen in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if len(set(self.getvalue().split(narration._CLEAR))) > 3:
            self.moved.set()
        return written


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narration, "AFTER_SECONDS", 0.02)
    monkeypatch.setattr(narration, "TICK_SECONDS", 0.01)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))


def plan(**options: object) -> ebbtide.Plan:
    return ebbtide.plan(model(), (torch.randn(4, 8),), budget="1MiB", options=ebbtide.Options(effort=10, **options))  # type: ignore[arg-type]


def fit(**options: object) -> None:
    # Nothing is measured: what a busy machine makes of that is another matter.
    fitted = ebbtide.fit(model(), "1MiB", options=ebbtide.Options(effort=10, verify=False, **options))  # type: ignore[arg-type]
    for _ in range(3):
        fitted(torch.randn(4, 8)).sum().backward()


def refused(**options: object) -> None:
    fitted = ebbtide.fit(model(), "1KiB", options=ebbtide.Options(effort=10, **options))  # type: ignore[arg-type]
    with pytest.raises(BudgetError):
        fitted(torch.randn(4, 8))


Call = Callable[..., object]
CALLS = pytest.mark.parametrize("call", [plan, fit, refused])


@CALLS
def test_one_line_of_the_log(call: Call, caplog: pytest.LogCaptureFixture) -> None:
    call()
    records = [each for each in caplog.records if each.name == "ebbtide"]
    assert 1 <= len(records) <= 2  # a loss outside the model is planned for twice
    assert records[0].levelno == logging.WARNING
    assert "captur" in records[0].getMessage()
    assert "progress=None" in records[0].getMessage()


@CALLS
def test_a_bar_on_a_terminal_that_goes(
    call: Call, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()

    class Over(threading.Event):
        """No call ends before its bar has moved: what else runs on the machine does not matter."""

        def set(self) -> None:
            terminal.moved.wait(60.0)
            super().set()

    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(narration, "threading", SimpleNamespace(Event=Over, Thread=threading.Thread))
    call()
    shown = terminal.getvalue().split(narration._CLEAR)
    assert len(set(shown)) > 3, "it moves"
    assert shown[-1] == "", "nothing is left"
    assert all("\n" not in each for each in shown)
    assert not caplog.records


@CALLS
@pytest.mark.parametrize("progress", [None, list[Progress]().append], ids=["None", "a function"])
def test_nothing_else_is_said(
    call: Call, progress: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    call(progress=progress)
    assert not [each for each in caplog.records if each.name.startswith("ebbtide")]
    assert narration._CLEAR not in terminal.getvalue()


def test_a_quick_call_says_nothing_and_no_thread_is_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narration, "AFTER_SECONDS", 60.0)
    begin = time.monotonic()
    fit()
    plan()
    refused()
    assert time.monotonic() - begin < 55.0, "nobody waits for it"
    assert not caplog.records
    assert not [each for each in threading.enumerate() if each.name == "ebbtide-progress"]


def test_a_closed_standard_error_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    terminal = Terminal()
    for error in (terminal, None):
        monkeypatch.setattr("sys.stderr", error)
        terminal.close()
        assert plan().predicted_peak_bytes <= 2**20
    assert not raised
    assert not [each for each in threading.enumerate() if each.name == "ebbtide-progress"]


# -- why it takes so long ------------------------------------------------------------------------------------------


class Tower(nn.Module):
    """Returns its loss, or the outputs of its layers for one outside."""

    def __init__(self, *, inside: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(64, 64), nn.GELU())))
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layers(x)
        return made.square().mean() if self.inside else made


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of the calls that wait."""
    said: list[str] = []

    @contextmanager
    def noted(progress: object, why: str) -> Generator[None]:
        said.append(why)
        yield

    monkeypatch.setattr(loop, "narrated", noted)
    return said


def tower(budget: str, *, inside: bool = True) -> Tower:
    return ebbtide.fit(Tower(inside=inside), budget, progress=None, options=ebbtide.Options(effort=10, verify=False))


ROWS = torch.randn(32, 64)
FULL = r"planned again, since {}: with that the plan at hand would go over the budget by ([\d.]+) KiB"
ACCUMULATED = "gradients are accumulated, or were not cleared before the forward"


def backward(made: Tower, x: torch.Tensor = ROWS) -> None:
    made(x).mean().backward()


def clear(made: Tower) -> None:
    made.zero_grad(set_to_none=True)


def test_a_first_call_says_that_it_is_one(reasons: list[str]) -> None:
    made = tower("100%")
    for rows in (ROWS, ROWS[:16]):
        backward(made, rows)
        clear(made)
    assert reasons == [FIRST, FIRST]


def test_accumulated_gradients(reasons: list[str]) -> None:
    made = tower("100%")
    for _ in range(3):
        backward(made)
    assert reasons[0] == FIRST
    assert re.fullmatch(FULL.format(ACCUMULATED), reasons[1])
    assert len(reasons) == 2, "micro-steps after the second have a plan"


def test_another_budget(reasons: list[str]) -> None:
    made = tower("100%")
    backward(made)
    clear(made)
    ebbtide.set_budget(made, "1GiB")
    backward(made)
    assert reasons[1:] == ["planned again, since another budget was set"]


def test_all_that_was_set_since_is_told(reasons: list[str]) -> None:
    made = tower("100%")
    backward(made)
    clear(made)
    ebbtide.set_budget(made, "1GiB")
    ebbtide.set_optimizer(made, torch.optim.SGD(made.parameters(), lr=0.1))
    backward(made)
    assert reasons[1:] == ["planned again, since another budget was set and another optimizer was set"]


def test_what_never_had_a_plan_is_not_planned_again_for_a_setting(reasons: list[str]) -> None:
    """A budget that was set before the first call of a shape is no reason for anything."""
    made = tower("1GiB")
    ebbtide.set_budget(made, 300)
    for _ in range(2):
        with pytest.raises(BudgetError):
            backward(made)
    assert not any("was set" in each for each in reasons)


def test_a_loss_outside(reasons: list[str]) -> None:
    made = tower("1GiB", inside=False)
    for _ in range(3):
        made(ROWS).tanh().square().sum().backward()
        clear(made)
    assert reasons[0] == FIRST
    [again] = reasons[1:]
    assert re.search("measured now", again)


def test_a_loss_outside_and_accumulated_gradients(reasons: list[str]) -> None:
    """Both are said, in one sentence; and how much is lacking, which is not what the gradients take."""
    made = tower("320KiB", inside=False)
    with contextlib.suppress(BudgetError):
        for _ in range(2):
            made(ROWS).tanh().square().sum().backward()
    told = re.fullmatch(
        "planned again, since what happens between forward and backward, such as a loss outside the model, is measured "
        rf"now, and {ACCUMULATED}: with that the plan at hand would go over the budget by ([\d.]+) KiB",
        reasons[1],
    )
    assert told is not None
    gradients = sum(each.nbytes for each in made.parameters())
    assert 0 < float(told[1]) * 1024 <= gradients + 1024


@pytest.mark.parametrize("why", [FIRST, CHANGED])
def test_why_and_what_goes_on_are_two_sentences(why: str) -> None:
    assert narration._with(Progress("capturing"), why) == f"capturing; {why}"
    assert narration._with(Progress(f"the step is {why}"), why) == f"the step is {why}"


def test_more_is_resident(reasons: list[str]) -> None:
    made = tower("100%")
    backward(made)
    clear(made)
    made.register_buffer("more", torch.zeros(1 << 16))
    backward(made)
    assert reasons[0] == FIRST
    [again] = reasons[1:]
    assert re.fullmatch(FULL.format("more is resident"), again)


def test_what_the_step_depends_on_has_changed(reasons: list[str]) -> None:
    made = tower("1GiB")
    backward(made)
    clear(made)
    made.inside = False
    backward(made)
    assert reasons[1] == CHANGED


def test_values_of_inputs_go_another_way(reasons: list[str]) -> None:
    class Asking(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum() * (2 if x.isnan().any() else 3)

    made = ebbtide.fit(Asking(4, 4), "1GiB")
    for x in (torch.ones(2, 4), torch.full((2, 4), torch.nan), torch.ones(2, 4)):
        made(x).backward()
        made.zero_grad()
    asked = "'return super().forward(x).sum() * (2 if x.isnan().any() else 3)' (test_narration.py:"
    assert reasons[0] == FIRST
    assert asked in reasons[1]
    assert reasons[1].startswith(OTHER_WAY.partition("{")[0])
    assert len(reasons) == 2


def test_another_forward_in_flight(reasons: list[str]) -> None:
    made = tower("100%")
    with pytest.warns(UserWarning, match="in flight"):
        first, second = made(ROWS), made(ROWS)
    (first + second).backward()
    assert reasons[0] == FIRST
    [again] = reasons[1:]
    assert re.fullmatch(FULL.format("another forward is in flight"), again)


def test_who_listens_hears_why(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    made = ebbtide.fit(
        Tower(), "100%", progress=lambda each: heard.append(str(each)), options=ebbtide.Options(effort=10, verify=False)
    )
    for _ in range(2):
        backward(made)
    assert any(each.startswith("the step of Tower is planned again, since ") for each in heard)
    assert heard[-1] == "lowering the plan and proving its graphs"
    assert not caplog.records


def test_a_graph_that_is_retained(reasons: list[str]) -> None:
    made = tower("400KiB")  # 100 % of the step, which is less, has no room for a graph that is retained
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this first step may exceed its budget
        for _ in range(2):
            loss = made(ROWS)
            loss.backward(retain_graph=True)
            loss.backward()
            del loss
            clear(made)
    assert reasons == [FIRST, "planned again, since a backward retains its graph"]


def test_a_refusal_says_that_its_smallest_is_for_cleared_gradients() -> None:
    made = tower("1KiB")
    with pytest.raises(BudgetError) as first:
        backward(made)
    gradients = sum(each.nbytes for each in made.parameters())
    assert any(f"add {format_bytes(gradients)} from" in each for each in first.value.__notes__)
    ebbtide.set_budget(made, first.value.smallest_bytes)
    backward(made)
    with pytest.raises(BudgetError) as second:
        backward(made)
    assert second.value.smallest_bytes <= first.value.smallest_bytes + gradients
    assert not any("are accumulated" in each for each in getattr(second.value, "__notes__", ()))

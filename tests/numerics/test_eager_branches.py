"""A model that asks whether it is compiled is captured as eager runs it, wherever that is one graph."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from eager_steps import assert_trains_as_eager, history
from ebbtide.engine.shared_calls import OWN_CAPTURES
from ebbtide.errors import CaptureError
from ebbtide.torch_seams.patches import open_patches

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def ways(m: Any, x: torch.Tensor, *, compiled: bool) -> torch.Tensor:
    """Two results that nobody takes for each other."""
    return (m.two(m.one(x)) if compiled else m.one(m.two(x))).square().mean()


def stream() -> bool:
    """Torch built without a device raises here; who asks catches that."""
    try:
        return torch.cuda.is_current_stream_capturing() or torch.xpu.is_current_stream_capturing()
    except Exception:
        return False


QUESTIONS: dict[str, Callable[[], bool]] = {
    "is_compiling": torch.compiler.is_compiling,
    "is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
    "is_exporting": torch.compiler.is_exporting,
    "dynamo": lambda: torch._dynamo.is_compiling(),  # pyright: ignore
    "stream": lambda: torch.compiler.is_compiling() or stream(),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_eagers_branch_is_captured(question: str, captures: list[Any]) -> None:
    ask = QUESTIONS[question]
    assert_trains_as_eager(Model(lambda m, x: ways(m, x, compiled=ask())), lambda: (X,))
    assert len(captures) == 1


def guarded(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A check that no graph can hold stands behind the first question; the second has nothing to do with it."""
    if not torch.compiler.is_compiling() and bool(torch.isnan(x).any()):
        x = x.nan_to_num()
    return ways(m, x, compiled=torch.compiler.is_compiling())


def test_only_the_question_before_a_break_gets_the_compilers_answer(captures: list[Any]) -> None:
    model = assert_trains_as_eager(Model(guarded), lambda: (X,))
    assert len(captures) == 1
    history(model, lambda: (X[:3],), 2)
    assert len(captures) == 2
    assert open_patches() == 0


def twice_broken(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        print("eager")
    h = m.one(x)
    if h.sum() > 0:
        h = m.two(h)
    return h.mean()


def test_the_break_that_no_question_guards_is_the_one_to_tell_of(captures: list[Any]) -> None:
    model = ebbtide.fit(Model(twice_broken), "1GiB")
    with pytest.raises(CaptureError, match=r"if h\.sum\(\) > 0"):
        model(X)
    assert not captures
    assert open_patches() == 0


def picky(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling() and x.shape[0] != 5:
        raise ValueError("five rows")
    return m.one(x).mean()


def test_what_eager_raises_is_raised() -> None:
    model = ebbtide.fit(Model(picky), "1GiB")
    with pytest.raises(ValueError, match="five rows"):
        model(X)
    model(X[:5]).backward()
    assert ebbtide.calls_of(model).planned == 1


def test_what_others_compile_meanwhile_is_compiled(captures: list[Any]) -> None:
    heard: list[bool] = []

    def other() -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            return x + 1 if torch.compiler.is_compiling() else x

        heard.append(torch.compile(function, backend="eager")(torch.zeros(1)).item() == 1)

    @torch._dynamo.assume_constant_result  # runs while the trace does
    def meanwhile() -> bool:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return True

    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        meanwhile()
        return ways(m, x, compiled=torch.compiler.is_compiling())

    assert_trains_as_eager(Model(body), lambda: (X,))
    other()
    assert heard
    assert all(heard)


# -- branches that follow from numbers alone -----------------------------------------------------------------------


def packed(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Positions as transformers makes them, asked whether they begin anew somewhere."""
    positions = torch.arange(x.shape[0]).unsqueeze(0)
    steps = torch.diff(positions, prepend=positions[:, :1] - 1)
    begins = (steps != 1).cumsum(-1)
    return ways(m, x, compiled=not (begins[:, -1] == 0).all())


def either(m: Any, x: torch.Tensor) -> torch.Tensor:
    known = torch.tensor([0, 1]).any() or torch.zeros(2).any()
    return ways(m, x, compiled=not torch.eye(2).bool().all()) * known


@pytest.mark.parametrize("body", [packed, either])
def test_a_branch_on_numbers_is_taken(body: Callable[..., Any], captures: list[Any]) -> None:
    assert_trains_as_eager(Model(body), lambda: (X,))
    assert len(captures) == 1


def of_data(m: Any, x: torch.Tensor) -> Any:
    return (torch.arange(6.0) + x[:, 0]).sum() > 0


def drawn(m: Any, x: torch.Tensor) -> Any:
    return torch.rand(3).mean() > 0.5


def overwritten(m: Any, x: torch.Tensor) -> Any:
    numbers = torch.zeros(6)
    view = numbers[1:]
    view += x[1:, 0]
    return numbers.sum() > 0


def uninitialised(m: Any, x: torch.Tensor) -> Any:
    return torch.empty(3).sum() > 0


@pytest.mark.parametrize("condition", [of_data, overwritten])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_on_inputs_is_taken(condition: Callable[..., Any], sign: int) -> None:
    assert_trains_as_eager(Model(lambda m, x: ways(m, x, compiled=condition(m, x))), lambda: (sign * X.abs() * 9,))


@pytest.mark.parametrize("condition", [drawn, uninitialised])
def test_a_branch_on_anything_else_is_refused(condition: Callable[..., Any]) -> None:
    model = ebbtide.fit(Model(lambda m, x: ways(m, x, compiled=True) if condition(m, x) else m.one(x).sum()), "1GiB")
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match="branch"):
        model(X)
    assert torch.equal(state, torch.get_rng_state())


def longer_than_eight(m: Any, x: torch.Tensor) -> torch.Tensor:
    return ways(m, x, compiled=torch.arange(x.shape[0]).max() > 8)


@pytest.mark.parametrize(("body", "own"), [(packed, OWN_CAPTURES), (longer_than_eight, OWN_CAPTURES + 1)])
def test_a_shared_capture_takes_such_branches_where_they_hold(
    body: Callable[..., Any], own: int, captures: list[Any]
) -> None:
    """The last length is on the other side of eight, where the shared capture does not serve."""
    rows = torch.randn(16, 8)
    model = Model(body)
    plain = copy.deepcopy(model)
    ebbtide.fit(model, "1GiB")
    for length in (4, 5, 6, 7, 8, 3, 12):
        mine, theirs = (history(each, lambda length=length: (rows[:length].clone(),), 1) for each in (model, plain))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), length  # type: ignore[arg-type]
    assert [each.symbolic for each in captures].count(True) == 1
    assert [each.symbolic for each in captures].count(False) == own
    assert ebbtide.calls_of(model).planned == 7

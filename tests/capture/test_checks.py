"""Checks of values in a forward are part of the step, and raise what eager raises, in the step in which they fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from eager_steps import assert_trains_as_eager, history
from ebbtide.errors import CaptureError

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
NAN, LARGE = X.clone().index_fill(0, torch.tensor([2]), torch.nan), X * 100


class Own(Exception):
    """A class whose arguments are not those that it is made with."""

    def __init__(self, why: str) -> None:
        super().__init__("own", why)


class Model(nn.Module):
    def __init__(self, check: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.check, self.limit = check, 9.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        self.check(self, x)
        return self.two(torch.tanh(h)).square().mean()


def raises(m: Any, x: torch.Tensor) -> None:
    if x.abs().max() > m.limit:
        raise ValueError(f"a value above {m.limit}: {{{x.shape[0]}}} rows")


def tells_values(m: Any, x: torch.Tensor) -> None:
    largest = x.max()
    if largest > 9:
        raise ValueError(f"{largest} or {largest:.1f}, not {x[0]}")


def otherwise(m: Any, x: torch.Tensor) -> None:
    if (x.abs() < 9).all():
        pass
    else:
        raise Own("too large")


def of_a_class(m: Any, x: torch.Tensor) -> None:
    if not torch.isfinite(x).all():
        raise KeyError


def either(m: Any, x: torch.Tensor) -> None:
    if torch.isnan(x).any() or (x > 9).any():
        raise FloatingPointError("not in range")


def in_a_context(m: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        if not torch.isfinite(x).all():
            raise RuntimeError("not finite")


def in_a_checkpoint(m: Any, x: torch.Tensor) -> None:
    def region(y: torch.Tensor) -> torch.Tensor:
        if y.isnan().any():
            raise ValueError("in a region")
        return y * 2

    checkpoint(region, x, use_reentrant=False)


def checked(m: Any, x: torch.Tensor) -> None:
    torch._check_tensor_all(x.abs() < 9)


def checked_with(m: Any, x: torch.Tensor) -> None:
    large = (x > 9).sum()
    torch._check_tensor_all_with(IndexError, large == 0, lambda: f"{large} values of {x.numel()} are large")  # type: ignore[attr-defined]


def hidden_from_compilers(m: Any, x: torch.Tensor) -> None:
    """As transformers checks: with its words in eager, without any where it is told that it is compiled."""
    large = (x > 9).sum()
    if torch.compiler.is_compiling():
        torch._check_tensor_all(large == 0)
    else:
        torch._check_tensor_all_with(ValueError, large == 0, lambda: f"{large} large values")  # type: ignore[attr-defined]


CHECKS = [
    raises, tells_values, otherwise, of_a_class, either, in_a_context, in_a_checkpoint, checked, checked_with,
    hidden_from_compilers,
]  # fmt: skip


def outcome(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[Any, ...]:
    try:
        return (model(x).item(),)
    except Exception as error:
        return type(error), error.args, str(error)


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_is_part_of_the_step(check: Callable[[Any, torch.Tensor], None]) -> None:
    model = assert_trains_as_eager(Model(check), lambda: (X,))
    plain = Model(check)
    plain.load_state_dict(model.state_dict())
    seen = [repr(outcome(plain, x)) for x in (X, NAN, LARGE, X)]
    assert [repr(outcome(model, x)) for x in (X, NAN, LARGE, X)] == seen
    assert len(set(seen)) > 1, "no input fails"
    for each in (model, plain):
        each.zero_grad()
        each(X).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    assert not ebbtide.calls_of(model).unplanned


def caught(m: Any, x: torch.Tensor) -> None:
    try:
        if (x > 9).any():
            raise KeyError("large")
    except KeyError:
        m.limit = 1.0


def says_more(m: Any, x: torch.Tensor) -> None:
    if (x > 9).any():
        print("large")
        raise ValueError("large")


def two_arguments(m: Any, x: torch.Tensor) -> None:
    if (x > 9).any():
        raise ValueError("large", 9)


def of_a_result(m: Any, x: torch.Tensor) -> None:
    loss = m.one(x).sum()
    if loss > 1e6:
        raise ValueError(f"{loss}")


def of_a_local_class(m: Any, x: torch.Tensor) -> None:
    class Local(Exception):
        pass

    if (x > 9).any():
        raise Local("large")


@pytest.mark.parametrize("check", [caught, says_more, two_arguments])
def test_a_branch_that_is_more_than_a_check_is_taken_as_eager_takes_it(
    check: Callable[[Any, torch.Tensor], None],
) -> None:
    model = assert_trains_as_eager(Model(check), lambda: (X,))
    expected = outcome(Model(check), LARGE)
    if check is says_more:  # what it says is in no graph
        with pytest.raises(CaptureError, match="print"):
            model(LARGE)
    elif check is two_arguments:
        assert outcome(model, LARGE) == expected
    else:
        assert isinstance(outcome(model, LARGE)[0], float)
        assert model.limit == 1.0
    history(model, lambda: (X,), 1)
    assert not ebbtide.calls_of(model).unplanned


@pytest.mark.parametrize("check", [of_a_result, of_a_local_class])
def test_a_branch_on_what_the_step_computes_is_refused(check: Callable[[Any, torch.Tensor], None]) -> None:
    model = ebbtide.fit(Model(check), "1GiB")
    with pytest.raises(CaptureError) as refused:
        model(X)
    assert refused.value.source.startswith("test_checks.py:")


def test_what_a_message_tells_is_guarded() -> None:
    model = ebbtide.fit(Model(raises), "1GiB")
    for limit in (9.0, 8.0):
        model.limit = limit
        with pytest.raises(ValueError, match=f"above {limit}"):
            model(LARGE)

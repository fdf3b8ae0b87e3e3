"""What a forward raises itself is what its caller gets, made as the forward makes it; what it catches is no error."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import CaptureError

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


class Two(Exception):
    def __init__(self, rows: int, wanted: int) -> None:
        super().__init__(f"{rows} rows, {wanted} wanted")
        self.rows, self.wanted = rows, wanted


class Named(ValueError):
    def __init__(self, text: str, *, values: list[int]) -> None:
        super().__init__(text)
        self.values = values


class Derived(Two):
    def __init__(self, rows: int) -> None:
        super().__init__(rows, 5)
        self.note = "derived"


class Silent(Exception):
    def __init__(self, rows: int) -> None:
        self.rows = rows


class Bare(KeyError):
    pass


MAKERS: dict[str, Callable[[int], Exception]] = {
    "two": lambda rows: Two(rows, 5),
    "named": lambda rows: Named("text", values=[rows, 2]),
    "derived": lambda rows: Derived(rows),
    "silent": lambda rows: Silent(rows),
    "bare": lambda rows: Bare("row", rows),
    "wrong": lambda rows: Two(rows),  # type: ignore[call-arg]
}


class Picky(nn.Module):
    """Takes five rows."""

    def __init__(self, make: Callable[[int], Exception]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.make = make

    def forward(self, x: torch.Tensor, where: str = "") -> torch.Tensor:
        if where == "with":
            with torch.autocast("cpu", torch.bfloat16):
                x = self.checked(x)
        elif where == "suppress":
            with contextlib.suppress(Exception):
                x = self.checked(x)
        elif where == "try":
            try:
                x = self.checked(x)
            except Exception:
                x = x * 2
        else:
            x = self.checked(x)
        return self.layer(x).mean()

    def checked(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 5:
            raise self.make(x.shape[0])
        return x


def raised(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what is asked
        call()
    return caught.value


def told(error: Exception) -> Any:
    return type(error), error.args, {name: value for name, value in vars(error).items() if name != "__notes__"}


@pytest.mark.parametrize("where", ["", "with"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_forwards_own_exception_is_the_callers(name: str, where: str) -> None:
    model = Picky(MAKERS[name])
    plain = copy.deepcopy(model)
    ebbtide.fit(model, "1GiB")
    assert told(raised(lambda: model(X, where))) == told(raised(lambda: plain(X, where)))
    assert ebbtide.calls_of(model).planned == 0


def test_after_an_exception_the_next_call_is_planned() -> None:
    model = ebbtide.fit(Picky(MAKERS["two"]), "1GiB")
    assert "Raised while the step was captured" in raised(lambda: model(X)).__notes__[0]
    model(X[:5]).backward()
    assert ebbtide.calls_of(model).planned == 1


@pytest.mark.parametrize("where", ["try", "suppress"])
def test_an_exception_that_is_caught_is_none(where: str) -> None:
    """Dynamo does not trace it: a break, and never the exception that eager's caller does not see."""
    model = ebbtide.fit(Picky(MAKERS["two"]), "1GiB")
    with pytest.raises(CaptureError):
        model(X, where)

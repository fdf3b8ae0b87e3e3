"""NumPy in a forward: what torch computes with other bits is refused at its line, all else has eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._numpy as torchs_numpy
from torch import nn

import ebbtide
from ebbtide.capture.rules.numpy_calls import JOINS, SAME
from ebbtide.errors import CaptureError

METHODS = frozenset("T astype flatten getitem item permute real setitem view".split())
"""Of arrays: values that are moved, or taken as they are."""
OPERATORS = frozenset("iadd imul isub itruediv mul neg pos sub truediv".split())

Weights = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """A layer whose rows are weighted by what NumPy makes of the input."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.linear, self.weights = nn.Linear(96, 32), weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.weights(x)).square().sum()


def mean(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy().mean(axis=1, keepdims=True))  # the line


def deviation(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.std(x.numpy(), axis=1, keepdims=True))  # the line


def norm(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.linalg.norm(x.numpy(), axis=1, keepdims=True))  # the line


def root(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sqrt(np.abs(x.numpy()[:, :1])))  # the line


def exponential(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.exp(x.numpy()[:, :1]))  # the line


def clipped(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.clip(x.numpy(), -0.5, 0.5)[:, :1].copy())


def largest(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.abs(x.numpy()).max(axis=1, keepdims=True) * np.float32(0.3) / 7 + 0.1)


def counted(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy((x.numpy() > 0).sum(axis=1, keepdims=True)).float()


def constant(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1] * np.log(2.0)


@pytest.mark.parametrize("weights", [mean, deviation, norm, root, exponential])
def test_what_torch_computes_with_other_bits_is_refused_at_its_line(weights: Weights) -> None:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(n for n in range(weights.__code__.co_firstlineno, len(lines)) if lines[n - 1].endswith("# the line"))
    with pytest.raises(CaptureError, match="NumPy computes") as raised:
        ebbtide.fit(Model(weights), "1GiB")(torch.randn(64, 96))
    assert raised.value.source == f"{Path(__file__).name}:{number}"
    assert str(raised.value).startswith("Compute it with torch")


@pytest.mark.parametrize("weights", [clipped, largest, counted, constant])
def test_what_has_the_same_bits_is_planned(weights: Weights) -> None:
    torch.manual_seed(0)
    eager, fitted = Model(weights), Model(weights)
    fitted.load_state_dict(eager.state_dict())
    ebbtide.fit(fitted, "200%")
    for _ in range(2):
        x = torch.randn(64, 96)
        losses = [model(x) for model in (eager, fitted)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
    for mine, theirs in zip(fitted.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("name", sorted(SAME - METHODS - OPERATORS - {"empty"}))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_planned_has_numpys_bits(name: str, dtype: type[np.floating]) -> None:
    """Each function on arrays and numbers, as far as both take them."""
    draws = np.random.default_rng(0)
    a, b = ((draws.standard_normal((64, 33)) * 3 + shift).astype(dtype) for shift in (0, 2.5))
    shape, compared = (3, 4), 0
    forms = [(a,), (a, b), (a, 0.3), (a, 1), (a, 3), (a, (0, 1)), (a, 0, 1), (a, -0.5, 0.5), (a > 0, a, b)]
    forms += [(a, shape), (shape,), (shape, 0.3), (4,), ([a, b],), (a, (33, 64)), (a[:1], (64, 33)), (a[:, :1], 1)]
    for arguments in forms:
        if isinstance(arguments[0], list) and name not in JOINS:
            continue
        given = tuple(torchs_numpy.asarray(each) if isinstance(each, np.ndarray) else each for each in arguments)
        if isinstance(arguments[0], list):
            given = ([torchs_numpy.asarray(each) for each in arguments[0]],)
        try:
            theirs, mine = getattr(np, name)(*arguments), getattr(torchs_numpy, name)(*given)
        except Exception:  # one of them takes no such arguments
            continue
        for each, other in zip(
            *(each if isinstance(each, list | tuple) else [each] for each in (theirs, mine)), strict=True
        ):
            compared += 1
            made = np.asarray(other.tensor if hasattr(other, "tensor") else other)
            np.testing.assert_array_equal(made, each)
            assert made.dtype == np.asarray(each).dtype or not isinstance(arguments[0], np.ndarray), arguments
    assert compared, "nothing was compared"

"""Under autocast a parameter is cast as often as in eager, and its gradients are summed in the same precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ebbtide

HALF: dict[str, Any] = {"device_type": "cpu", "dtype": torch.bfloat16}
X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


class Two(nn.Module):
    """Two layers and a body that uses the first one more than once."""

    def __init__(self, body: Callable[[Two, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).float().square().sum()


def twice(m: Two, x: Tensor) -> Tensor:
    return m.second(m.first(m.first(x).tanh()).tanh())


def inside(m: Two, x: Tensor) -> Tensor:
    with torch.autocast(**HALF):
        y = m.first(m.first(x).tanh()).tanh()
    return m.second(y.float())


def in_two_blocks(m: Two, x: Tensor) -> Tensor:
    for _ in range(2):
        with torch.autocast(**HALF):
            x = m.first(x).tanh()
    return x


def nested(m: Two, x: Tensor) -> Tensor:
    with torch.autocast(**HALF):
        y = m.first(x).tanh()
        with torch.autocast("cpu", enabled=False):
            y = m.first(y.float()).tanh()
        y = m.first(y).tanh()
        with torch.autocast(**HALF):
            return m.first(y).tanh()


def without_a_cache(m: Two, x: Tensor) -> Tensor:
    with torch.autocast(**HALF, cache_enabled=False):
        return m.first(m.first(x).tanh())


def tied(m: Two, x: Tensor) -> Tensor:
    with torch.autocast(**HALF):
        return F.linear(m.first(x).tanh(), m.first.weight) @ m.first.weight + F.linear(x, m.first.weight[:1])


def inputs_of_several(m: Two, x: Tensor) -> Tensor:
    with torch.autocast(**HALF):
        return m.first(x) + m.second(x) * m.first(x)


def results(model: nn.Module, outside: bool, kind: str) -> list[Tensor]:
    leaf = X.clone().requires_grad_(kind != "data")
    model.zero_grad()
    with torch.autocast(**HALF, enabled=outside):
        loss = model(leaf * 1 if kind == "result" else leaf)
    loss.backward()
    return [loss.detach(), *(p.grad for p in (*model.parameters(), leaf) if p.grad is not None)]


@pytest.mark.parametrize(
    ("body", "outside"),
    [(twice, True), (in_two_blocks, True)]
    + [(body, False) for body in (inside, in_two_blocks, nested, without_a_cache, tied)],
)
def test_a_weight_is_cast_as_in_eager(body: Callable[[Two, Tensor], Tensor], outside: bool) -> None:
    plain = Two(body)
    fitted = ebbtide.fit(copy.deepcopy(plain), "1MiB", options=ebbtide.Options(effort=50))
    for ours, theirs in zip(results(fitted, outside, "data"), results(plain, outside, "data"), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it, in any compiled function
@pytest.mark.parametrize("kind", ["leaf", "result"])
def test_an_input_is_cast_once_where_it_is_a_leaf(kind: str) -> None:
    plain = Two(inputs_of_several)
    fitted = ebbtide.fit(copy.deepcopy(plain), "1MiB", options=ebbtide.Options(effort=50))
    for ours, theirs in zip(results(fitted, False, kind), results(plain, False, kind), strict=True):
        assert torch.equal(ours, theirs)

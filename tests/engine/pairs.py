"""A model with its optimizer in the step, and a twin that nobody has fitted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ebbtide


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).square().mean()


Pair = tuple[Net, torch.optim.Optimizer]


def fitted(**options: Any) -> Pair:
    torch.manual_seed(0)
    model = Net()
    return inside(model, torch.optim.AdamW(model.parameters(), lr=0.01), **options)


def inside(model: Any, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """Both, once the model is fitted with its optimizer in the step."""
    ebbtide.fit(model, "100%", optimizer=optimizer, step="inside", progress=None, options=ebbtide.Options(**options))
    return model, optimizer


def with_twin(
    make: Callable[[Any], torch.optim.Optimizer], kind: Callable[[], nn.Module] = Net, **options: Any
) -> tuple[Any, Any]:
    """A model of a kind with its optimizer in the step, and a twin that nobody has fitted."""
    torch.manual_seed(0)
    model = kind()
    twin = copy.deepcopy(model)
    return inside(model, make(model.parameters()), **options), (twin, make(twin.parameters()))


def assert_steps_alike(pair: Any, twin: Any, steps: int = 3, max_norm: float | None = None) -> None:
    """After each of some steps a model has the weights of its twin, whose gradients are clipped if the model's are."""
    for seed in range(steps):
        step(pair, seed)
        net, plain = twin
        plain.zero_grad()
        net(batch(seed)).backward()
        if max_norm is not None:
            total = nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            assert torch.equal(total, ebbtide.total_norm(pair[0]))  # type: ignore[arg-type]
        plain.step()
        assert equal(weights(pair[0]), weights(net))


def batch(seed: int = 0) -> Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))


def step(pair: Pair, seed: int = 0) -> float:
    model, optimizer = pair
    optimizer.zero_grad()
    loss = model(batch(seed))
    loss.backward()
    optimizer.step()
    return loss.item()


def weights(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def eager(steps: int = 0) -> Pair:
    """A twin that nobody has fitted, after some steps."""
    torch.manual_seed(0)
    model = Net()
    pair = model, torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(steps):
        step(pair, seed)
    return pair


class Descent(torch.optim.Optimizer):
    """An optimizer of somebody's own that steps each parameter by :meth:`of`, whether or not it has a gradient."""

    def __init__(self, params: Any, lr: Any = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.of_group(group)

    def of_group(self, group: dict[str, Any]) -> None:
        for each in group["params"]:
            self.of(group, each)

    def of(self, group: dict[str, Any], parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.add_(parameter.grad, alpha=-group["lr"])

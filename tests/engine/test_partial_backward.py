"""``torch.autograd.grad`` of some of a step's parameters runs what these need, with eager's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide


class _Decoder(nn.Module):
    """Convolutions with what repeats in a backward, drops, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)]
        self.body = nn.Sequential(*(each for block in blocks for each in block))
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x))


Asked = Callable[[Any], Sequence[nn.Parameter]]
ASKED: dict[str, Asked] = {
    "last": lambda m: [m.last.weight],
    "last two": lambda m: [m.last.weight, m.last.bias],
    "middle": lambda m: [m.body[8].weight],
    "all": lambda m: list(m.parameters()),
}


def _steps(model: Any, asked: Asked, count: int = 4) -> tuple[list[torch.Tensor], list[int]]:
    """What each step has made, and how many convolutions the gradients that are asked for ran backwards."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    made: list[torch.Tensor] = []
    ran: list[int] = []
    for _ in range(count):
        optimizer.zero_grad()
        output = model(torch.randn(4, 8, 24, 24))
        first, second = output.square().mean(), output.abs().mean()
        profile = torch.autograd.profiler.profile()
        with profile:
            of_first = torch.autograd.grad(first, asked(model), retain_graph=True)
        ran.append(sum(each.name == "aten::convolution_backward" for each in profile.function_events or ()))
        of_second = torch.autograd.grad(second, asked(model), retain_graph=True)
        (first + second * of_first[0].norm() / of_second[0].norm()).backward()
        optimizer.step()
        made += [*of_first, *of_second, *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
    return [*made, *(each.clone() for each in model.state_dict().values())], ran


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("budget", ["100%", "80%"])
@pytest.mark.filterwarnings("ignore:this backward retains its graph", "ignore:code after a backward")
def test_it_runs_what_is_asked_for_and_has_eagers_bits(asked: Asked, budget: str) -> None:
    eager = _Decoder()
    planned = ebbtide.fit(copy.deepcopy(eager), budget, progress=None)
    expected, by_eager = _steps(eager, asked)
    found, by_plan = _steps(planned, asked)
    assert all(map(torch.equal, expected, found))
    assert by_plan[-1] == by_eager[-1]

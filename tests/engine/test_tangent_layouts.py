"""Gradients that arrive at a model's outputs in another memory layout than they were traced with: eager's bits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.capture.layouts import laid_out, layouts_of
from ebbtide.errors import CaptureError

Loss = Callable[[Any], Tensor]


def convolution() -> tuple[nn.Module, Callable[[int], Tensor]]:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 1)), lambda _: torch.randn(4, 3, 12, 12)


def linear() -> tuple[nn.Module, Callable[[int], Tensor]]:
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 6))
    return model, lambda _: torch.randn(8, 20, 16)


def normed() -> tuple[nn.Module, Callable[[int], Tensor]]:
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)), lambda _: torch.randn(32, 16)


class Heads(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(16, 24), nn.Linear(24, 12), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.one(hidden), self.other(hidden)


def weighted(values: Tensor) -> Tensor:
    return (values * torch.linspace(-1, 1, values.numel()).reshape(values.shape)).sum()


def transposed(values: Tensor) -> Tensor:
    return weighted(values.flatten(2).transpose(1, 2) if values.dim() > 3 else values.transpose(0, 1))


def joined(values: Tensor) -> Tensor:
    """The gradient of the first part lies in the memory of that of both."""
    return weighted(torch.cat([values, values.detach()], -1))


def trained(model: nn.Module, draw: Callable[[int], Tensor], losses: Sequence[Loss], steps: int = 4) -> list[Any]:
    torch.manual_seed(7)
    inputs = [draw(step) for step in range(steps)]
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    found: list[Any] = []
    for step, x in enumerate(inputs):
        losses[step % len(losses)](model(x)).backward()
        found.append(gradients(model))
        found[-1] += [each.clone() for each in model.buffers()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def assert_eagers(
    model: nn.Module, draw: Callable[[int], Tensor], losses: Sequence[Loss], budget: Any = "1GiB", **options: Any
) -> nn.Module:
    """Bit by bit at every step; the fitted model."""
    eager = copy.deepcopy(model)
    planned = ebbtide.fit(model, budget, progress=None, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, expected = trained(planned, draw, losses), trained(eager, draw, losses)
    assert not [each for each in caught if "memory layout" in str(each.message)]
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs)), f"step {step}"
    return planned


@pytest.mark.parametrize("loss", [transposed, joined, torch.sum, torch.mean, lambda y: weighted(y.mean(1))])
@pytest.mark.parametrize("make", [convolution, linear, normed])
def test_every_step_has_eagers_bits(make: Callable[[], Any], loss: Loss) -> None:
    torch.manual_seed(0)
    model, draw = make()
    assert_eagers(model, draw, [loss])


def test_layouts_that_alternate() -> None:
    torch.manual_seed(0)
    assert_eagers(*convolution(), [transposed, weighted, torch.sum])


def test_one_output_of_two() -> None:
    torch.manual_seed(0)
    losses = [lambda two: transposed(two[0]) + weighted(two[1]), lambda two: transposed(two[1])]
    assert_eagers(Heads(), lambda _: torch.randn(4, 10, 16), losses)


def test_shapes_that_share_a_capture() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 12))
    lengths = (10, 13, 16, 19)
    assert_eagers(model, lambda step: torch.randint(0, 32, (4, lengths[step])), [transposed])


def test_in_the_memory_of_larger_ones_with_shapes_that_share_a_capture() -> None:
    """Which no capture of many shapes holds: this is said at the first step, and the next has a capture of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 12))
    eager, planned = copy.deepcopy(model), ebbtide.fit(model, "1GiB", progress=None)
    for length in (10, 13, 16, 16, 16):
        x = torch.randint(0, 32, (4, length))
        for each in (eager, planned):
            each.zero_grad()
        joined(eager(x)).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            joined(planned(x)).backward()
        said = any("memory layout" in str(each.message) for each in caught)
        assert said or all(map(torch.equal, gradients(planned), gradients(eager)))
    assert not said


@pytest.mark.parametrize("share", ["60%", "80%"])
def test_what_is_made_again_is_verified_and_the_budget_holds(share: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()) for _ in range(6)]
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *layers, nn.Conv2d(8, 2, 1))
    planned = assert_eagers(model, lambda _: torch.randn(8, 3, 16, 16), [transposed], share)
    step, plan = ebbtide.step_of(planned), ebbtide.plan_of(planned)
    assert step is not None
    assert plan is not None
    assert step.verified_buffers > 0
    assert step.measured_above_bytes is not None
    assert plan.resident_bytes + step.measured_above_bytes <= plan.budget_bytes


def test_a_number_expanded_is_no_reason_to_plan_again() -> None:
    said: list[Any] = []
    torch.manual_seed(0)
    model, draw = convolution()
    planned = ebbtide.fit(model, "1GiB", progress=said.append)
    trained(planned, draw, [torch.sum])
    assert not [each for each in said if "layout" in str(each)]
    transposed(planned(draw(0))).backward()
    transposed(planned(draw(0))).backward()
    assert [each for each in said if "layout" in str(each)]


def test_updates_in_the_backward() -> None:
    torch.manual_seed(0)
    model, draw = convolution()
    eager, x = copy.deepcopy(model), draw(0)
    inside = torch.optim.SGD(model.parameters(), 1e-2)
    planned = ebbtide.fit(model, "1GiB", optimizer=inside, step="inside", progress=None)
    optimizer = torch.optim.SGD(eager.parameters(), 1e-2)
    for _ in range(3):
        transposed(planned(x)).backward()
        transposed(eager(x)).backward()
        for each in (optimizer, inside):
            each.step()
            each.zero_grad()
        assert all(map(torch.equal, planned.parameters(), eager.parameters()))


def test_layouts_are_strides_where_they_say_something() -> None:
    values = torch.empty(2, 1, 3)
    assert layouts_of([values.as_strided((2, 1, 3), (3, 99, 1))], [values]) == (None,)
    assert layouts_of([values.transpose(0, 2).contiguous().transpose(0, 2)], [values]) == ((1, 2, 2),)
    assert layouts_of([torch.empty(0, 3).t().contiguous().t()], [torch.empty(0, 3)]) == (None,)


def test_a_layout_by_the_order_of_dimensions() -> None:
    lies = torch.empty(2, 5, 3).permute(2, 0, 1)
    like = laid_out(lies.shape, lies.stride(), symbolic=True)
    larger = like(torch.empty(4, 3, 7))
    assert larger.shape == (4, 3, 7)
    assert larger.stride() == torch.empty(3, 7, 4).permute(2, 0, 1).stride()
    expanded = torch.empty(3).expand(2, 3)
    assert laid_out((2, 3), expanded.stride(), symbolic=True)(torch.empty(4, 5)).stride() == (0, 1)
    with pytest.raises(CaptureError):
        laid_out((2, 3), torch.empty(2, 6)[:, :3].stride(), symbolic=True)

"""A new shape with its loss outside is planned by what losses of other shapes took, and for the least memory if not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide.engine.key import CallSlot
from ebbtide.engine.known_windows import KnownWindows
from ebbtide.engine.user_window import UserWindow
from ebbtide.engine.validity import LEAST_MEMORY

WIDTH, CLASSES = 48, 200


def model_of() -> nn.Module:
    layers = [each for _ in range(6) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def entropy(output: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.arange(len(output)) % CLASSES)


def pairs(output: Tensor) -> Tensor:
    return torch.logsumexp(output @ output.t(), 1).mean()


def trained(model: nn.Module, loss: Callable[[Tensor], Tensor], rows: Sequence[int]) -> list[Tensor]:
    torch.manual_seed(1)
    found: list[Tensor] = []
    for count in rows:
        model.zero_grad()
        value = loss(model(torch.randn(count, WIDTH)))
        value.backward()
        found += [value.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
    return found


@pytest.mark.parametrize("loss", [entropy, pairs])
def test_only_the_first_shape_is_planned_for_the_least_memory(loss: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    eager = model_of()
    model = ebbtide.fit(copy.deepcopy(eager), "4MiB", progress=None)
    planners = [
        [trained(model, loss, [rows]), ebbtide.plan_of(model).planner][1]  # type: ignore[union-attr]
        for rows in (400, 400, 300, 450, 350)
    ]
    assert planners[0] == LEAST_MEMORY
    assert LEAST_MEMORY not in planners[1:]
    assert all(map(torch.equal, trained(eager, loss, [320, 430]), trained(model, loss, [320, 430])))


def test_where_the_budget_has_no_room_for_that_the_least_memory_is_planned_as_before() -> None:
    """The larger shape's loss takes less than one of its pairs would, so that its first step holds."""
    torch.manual_seed(0)
    model = ebbtide.fit(model_of(), "4MiB", progress=None)
    trained(model, pairs, [450, 450])
    trained(model, entropy, [900])
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.planner == LEAST_MEMORY


def test_a_loss_that_takes_more_than_was_likely_is_said_at_that_step() -> None:
    torch.manual_seed(0)
    model = ebbtide.fit(model_of(), "2MiB", progress=None)
    trained(model, entropy, [300, 300])
    with pytest.warns(UserWarning, match="code outside the model took"):
        trained(model, lambda output: torch.cat([output] * 8).square().mean(), [310])


def test_more_bytes_take_more_by_their_square_and_fewer_in_proportion() -> None:
    known, slot = KnownWindows(), CallSlot("first", 0)
    assert known.likely_loss(CallSlot("second", 0), 100) is None
    known.learn_loss(slot, 1000, 10, 100)
    assert known.likely_loss(CallSlot("second", 0), 50) == UserWindow(500, 5, 500)
    assert known.likely_loss(CallSlot("second", 0), 200) == UserWindow(4000, 40, 4000)
    assert known.likely_loss(CallSlot("second", 1), 200) is None  # of another call of a round
    known.learn_loss(CallSlot("none", 0), 7, 7, 0)
    known.learn_loss(CallSlot("third", 0), 900, 90, 50)
    assert known.likely_loss(CallSlot("second", 0), 50) == UserWindow(900, 90, 900)

"""Batches that a data loader has given count as resident while somebody has them, whether or not a model gets them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ebbtide
from ebbtide.measurement import batches, leftovers

ROWS, WIDTH = 64, 32
PART = ROWS * WIDTH * 4  # bytes of one tensor of a batch


@pytest.fixture(autouse=True)
def _nothing_left_of_other_tests() -> None:
    gc.collect()


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def fitted() -> nn.Module:
    return ebbtide.fit(Tower(), "1GiB", progress=None, options=ebbtide.Options(effort=50))


def own(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters())


def resident(model: nn.Module) -> int:
    """As it is now: planned anew, after gradients have been let go of."""
    plan = ebbtide.plan_of(model)
    assert plan is not None
    return plan.resident_bytes


def pairs(count: int = 4) -> TensorDataset:
    return TensorDataset(torch.randn(count * ROWS, WIDTH), torch.randn(count * ROWS, WIDTH))


def named(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    inputs, labels = zip(*rows, strict=True)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}


def test_labels_of_a_loss_outside_count() -> None:
    model = fitted()
    for x, y in DataLoader(pairs(), batch_size=ROWS):
        nn.functional.mse_loss(model(x), y).backward()
        break
    assert resident(model) == own(model) + 2 * PART


@pytest.mark.parametrize("fetched", [1, 3])
def test_batches_fetched_ahead_count_until_they_are_let_go_of(fetched: int) -> None:
    model = fitted()
    loader = iter(DataLoader(pairs(), batch_size=ROWS, collate_fn=named))
    given = [next(loader) for _ in range(fetched)]
    model(given[0]["inputs"]).sum().backward()
    assert resident(model) == own(model) + fetched * 2 * PART
    del given[1:]
    del given[0]["labels"]
    model.zero_grad()
    ebbtide.set_budget(model, "2GiB")
    model(given[0]["inputs"]).sum().backward()
    assert resident(model) == own(model) + PART


def test_a_loop_over_many_batches_counts_those_that_live() -> None:
    model, x = fitted(), torch.randn(ROWS, WIDTH)
    for _ in DataLoader(pairs(40), batch_size=ROWS):
        pass
    del _
    model(x).sum().backward()
    assert resident(model) == own(model) + PART
    assert leftovers.left_bytes() == 0


def test_a_data_set_that_gives_out_parts_of_itself_counts_as_before() -> None:
    model = fitted()
    whole = torch.randn(100, WIDTH)
    x = torch.randn(ROWS, WIDTH)
    row = next(iter(DataLoader(TensorDataset(whole), batch_size=None)))
    assert row[0]._is_view()
    model(x).sum().backward()
    assert resident(model) == own(model) + PART


def test_a_batch_cut_from_one_tensor_counts_once() -> None:
    def cut(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        return list(torch.stack([each for each, _ in rows]).split(ROWS // 2))

    model = fitted()
    batch = next(iter(DataLoader(pairs(), batch_size=ROWS, collate_fn=cut)))
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    assert resident(model) == own(model) + 2 * PART
    del batch


def test_nothing_is_watched_once_no_model_is_fitted() -> None:
    while batches._open:
        batches._open.pop().close()
    models = [fitted]
    batches.watch_batches(lambda: models)
    first = list(DataLoader(pairs(), batch_size=ROWS))
    assert leftovers.left_bytes() == 4 * 2 * PART
    models.clear()
    second = list(DataLoader(pairs(), batch_size=ROWS))
    assert leftovers.left_bytes() == 4 * 2 * PART
    assert not batches._open
    del first, second

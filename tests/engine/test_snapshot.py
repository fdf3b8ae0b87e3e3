"""What a failed proof puts back is whole, and is copied without more memory than there is of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine.snapshot import _spans, snapshot

BASE = 256 * 1024


def buffers(name: str) -> list[torch.Tensor]:
    """Of 256 KiB in all, or less."""
    match name:
        case "whole":
            return [torch.randn(BASE // 4)]
        case "expanded":
            return [torch.randn(64).expand(4096, 64), torch.ones(()).expand(2048, 2048)]
        case "strided":
            return [torch.randn(64, 1024).t()[::2], torch.randn(8, 4)[:, 1]]
        case "of one storage":
            table = torch.randn(BASE // 4)
            return [table[:1000], table[500:2000].view(30, 50), table[100:]]
        case "of other types":
            return [
                torch.ones(9, dtype=torch.bool),
                torch.randn(3, dtype=torch.complex64),
                torch.tensor(3),
                torch.empty(0),
            ]
        case _:
            raise AssertionError(name)


CASES = pytest.mark.parametrize("name", ["whole", "expanded", "strided", "of one storage", "of other types"])


def module_with(tensors: list[torch.Tensor]) -> nn.Module:
    module = nn.Module()
    for index, each in enumerate(tensors):
        module.register_buffer(f"b{index}", each)
    return module


@CASES
def test_values_and_random_state_come_back(name: str) -> None:
    module = module_with(buffers(name))
    before, state = [b.clone() for b in module.buffers()], torch.get_rng_state()
    restore = snapshot(list(module.buffers()), "cpu")
    for buffer in module.buffers():
        buffer.untyped_storage().fill_(1)
    torch.rand(3)
    restore()
    assert all(torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@CASES
def test_a_copy_takes_what_is_said_and_no_more_than_there_is(name: str) -> None:
    module = module_with(buffers(name))
    with ebbtide.measure(module) as measured:
        restore = snapshot(list(module.buffers()), "cpu")
    size = sum(end - begin for _, begin, end in _spans(module.buffers()))
    assert size <= measured.above_bytes <= size + 2 * 5056
    assert size <= measured.start_bytes
    del restore


def test_only_what_a_step_changes_is_held_in_reserve() -> None:
    """A large buffer that is only read, as a rotary table or a mask, is no second time in the budget."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.norm = nn.BatchNorm1d(64)
            self.register_buffer("table", torch.randn(512, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.norm(self.layer(x)) * self.table).square().mean()

    model, x = Masked(), torch.randn(512, 64)
    plan = ebbtide.plan(model, (x,), budget="100%", options=ebbtide.Options(effort=10))
    assert 2 * 64 * 4 <= plan.reserve_bytes <= 512 * 64 * 4 // 2
    ebbtide.fit(model, "100%", options=ebbtide.Options(effort=10))
    model(x).backward()
    fitted = ebbtide.plan_of(model)
    assert fitted is not None
    assert fitted.reserve_bytes == plan.reserve_bytes

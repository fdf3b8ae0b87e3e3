"""Resident bytes are the distinct storages that the roots reach, each counted once."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

import ebbtide
from ebbtide.measurement.resident import device_of, resident_bytes
from ebbtide.torch_seams.fake_tensors import FakeTensorMode
from ebbtide.torch_seams.storages import walk


def test_a_tensor_counts_its_whole_storage() -> None:
    base = torch.zeros(100)
    assert resident_bytes([base]) == 400
    assert resident_bytes([base[3:4]]) == 400
    assert resident_bytes([base, base[:50], base.reshape(10, 10).t()]) == 400


def test_parameters_buffers_and_gradients_count() -> None:
    model = nn.BatchNorm1d(4)  # weight, bias, mean, variance of 16 bytes, a count of 8
    assert resident_bytes([model]) == 4 * 16 + 8
    model.weight.grad = torch.zeros(4)
    assert resident_bytes([model]) == 5 * 16 + 8


def test_tied_parameters_count_once() -> None:
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    assert resident_bytes([model]) == 128
    model[1].weight = model[0].weight
    assert resident_bytes([model]) == 64


def test_containers_are_walked() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    assert resident_bytes([{"a": [one, (two, None, 3, "text")]}]) == 12


def test_optimizer_state_counts() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    assert resident_bytes([model, optimizer]) == 64
    model.weight.grad = torch.ones(4, 4)
    optimizer.step()
    assert resident_bytes([model, optimizer]) == 4 * 64 + 4  # weight, gradient, two moments, the step


def test_granularity_rounds_each_storage_up() -> None:
    assert resident_bytes([torch.zeros(1), torch.zeros(129)], 512) == 512 + 1024


def test_nothing_is_nothing() -> None:
    assert resident_bytes([]) == 0
    assert resident_bytes([None, 3, torch.empty(0)]) == 0
    assert device_of([None]) == "cpu"
    assert device_of([nn.Linear(1, 1)]) == "cpu"


@dataclasses.dataclass
class Cache:
    key: torch.Tensor


def test_what_modules_hold_otherwise_counts() -> None:
    """Attributes, containers of containers, dataclasses, modules in lists: whether a step reads them or not."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model[0].tables = {7: torch.zeros(10), 8: [torch.zeros(20)], 9: {"x": (Cache(torch.zeros(30)),)}}  # type: ignore[assignment]
    model.table = torch.zeros(40)
    model.teacher = [nn.Linear(5, 5, bias=False)]  # type: ignore[assignment]
    model.teacher[0].weight.grad = torch.zeros(5, 5)  # type: ignore[index]
    model.words = list(range(1000))  # type: ignore[assignment]
    held = 4 * (10 + 20 + 30 + 40 + 25 + 25)
    assert resident_bytes([model]) == 64 + held
    assert sum(walk(model)[2].values()) == 64 + held


def test_what_has_no_memory_does_not_count() -> None:
    model = nn.Linear(4, 4, bias=False)
    with FakeTensorMode():
        model.fake = torch.zeros(10)
    model.meta = torch.zeros(10, device="meta")
    model.itself = [model]  # type: ignore[assignment]
    assert resident_bytes([model]) == sum(walk(model)[2].values()) == 64


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(64, 64, bias=False), [0.5] * 2048

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * torch.tensor(self.numbers)[:64]).square()


def test_outputs_without_gradients_and_constants_count() -> None:
    model = ebbtide.fit(Holding(), "1GiB", options=ebbtide.Options(effort=100))
    x = torch.randn(32, 64)
    with torch.no_grad():
        kept = [model(x) for _ in range(3)]
    model(x).sum().backward()
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.resident_bytes == 64 * 64 * 4 + x.nbytes + 2048 * 4 + sum(each.nbytes for each in kept)
    model.zero_grad()
    del kept[:2]
    ebbtide.set_budget(model, "2GiB")  # planned anew
    model(x).sum().backward()
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.resident_bytes == 64 * 64 * 4 + x.nbytes + 2048 * 4 + kept[0].nbytes


def test_what_is_put_on_a_module_of_torchs_later_counts() -> None:
    conv, plain = nn.Conv2d(1, 1, 1, bias=False), nn.Conv2d(1, 1, 1, bias=False)
    assert sum(walk(plain)[2].values()) == 4  # its class is known from here on
    conv.mask = torch.zeros(3)
    assert sum(walk(conv)[2].values()) == 4 + 12
    marked, kept = nn.Sequential(), nn.Sequential()
    marked.last = 0  # type: ignore[assignment]
    assert walk(marked)[2] == {}
    kept.last = torch.zeros(7)
    assert sum(walk(kept)[2].values()) == 28
    marked.last = torch.zeros(7)
    assert sum(walk(marked)[2].values()) == 28
    activation = nn.Softmax(None)
    assert walk(activation)[2] == {}
    activation.dim = torch.zeros(5)  # type: ignore[assignment]  # what was None may become a tensor
    assert sum(walk(activation)[2].values()) == 20


def test_what_is_reached_twice_counts_where_it_is_nearer() -> None:
    """Containers are looked into to a depth: from the farther way nothing of the tensor is seen."""
    inner = {"a": {"b": {"c": torch.zeros(3)}}}
    far = nn.Module()
    far.held = [[inner]]  # type: ignore[assignment]
    near = nn.Module()
    near.held = inner  # type: ignore[assignment]
    assert walk(far)[2] == {}
    for children in ([far, near], [near, far]):
        assert sum(walk(nn.ModuleList(children))[2].values()) == 12

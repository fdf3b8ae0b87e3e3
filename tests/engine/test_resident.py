"""Resident bytes are the distinct storages that the roots reach, each counted once."""

from __future__ import annotations

import torch
from torch import nn

from ebbflow.measurement.resident import device_of, resident_bytes


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

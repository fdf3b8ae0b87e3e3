"""Arithmetic against a direct count, traffic by extent, and the roofline's two slopes."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from ebbtide.cost.call import Call, TensorSpec, call_of
from ebbtide.cost.roofline import flops_of, roofline_seconds, traffic_bytes
from ebbtide.step.machine import Machine, machine_named

aten = torch.ops.aten


def spec(*shape: int, stride: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, stride or torch.empty(shape, device="meta").stride(), dtype, "cpu")


def call(target: object, args: tuple[object, ...], *outputs: TensorSpec) -> Call:
    assert callable(target)
    return Call(target, args, {}, outputs, str(target))


@pytest.fixture
def machine() -> Machine:
    """One flop and one byte per second, no launch: seconds are counts."""
    return Machine("slow", "cpu", 0, {"float32": 1.0, "bfloat16": 2.0}, 1.0, 0.0, 1)


def test_a_product_counts_two_flops_per_multiply_add() -> None:
    assert flops_of(call(aten.mm.default, (spec(3, 5), spec(5, 7)), spec(3, 7))) == 2 * 3 * 5 * 7


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("mask", [(True, False), (False, True), (True, True)])
def test_each_gradient_of_a_convolution_costs_its_forward(groups: int, mask: tuple[bool, bool]) -> None:
    x, w, y = spec(2, 8, 10, 10), spec(16, 8 // groups, 3, 3), spec(2, 16, 8, 8)
    tail = ([1, 1], [0, 0], [1, 1], False, [0, 0], groups)
    forward = flops_of(call(aten.convolution.default, (x, w, None, *tail), y))
    assert forward == 2 * (2 * 16 * 8 * 8) * (8 // groups) * 9
    arguments = (y, x, w, [16], *tail, [*mask, True])
    assert flops_of(call(aten.convolution_backward.default, arguments, x, w, spec(16))) == forward * sum(mask)


def test_attention_of_the_cpu_is_counted() -> None:
    q = spec(2, 4, 16, 8)
    made = call(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q), q, spec(2, 4, 16))
    assert flops_of(made) == 2 * (2 * 2 * 4 * 16 * 16 * 8)
    logsumexp = spec(2, 4, 16)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert flops_of(call(back, (q, q, q, q, q, logsumexp, 0.0, False), q, q, q)) > flops_of(made)


def test_pointwise_ops_count_traffic_only() -> None:
    made = call(aten.add.Tensor, (spec(4, 8), spec(4, 8)), spec(4, 8))
    assert flops_of(made) == 0
    assert traffic_bytes(made) == 3 * 4 * 8 * 4


def test_an_expanded_tensor_is_read_once() -> None:
    row = spec(1000, 8, stride=(0, 1))
    assert traffic_bytes(call(aten.neg.default, (row,), spec(1000, 8))) == (8 + 8000) * 4


def test_a_slice_does_not_read_what_lies_between() -> None:
    column = spec(10, 1, stride=(100, 1))
    assert traffic_bytes(call(aten.neg.default, (column,), spec(10, 1))) == (10 + 10) * 4


def test_an_embedding_does_not_read_its_whole_table() -> None:
    made = call(aten.embedding.default, (spec(50_000, 64), spec(16, dtype=torch.int64)), spec(16, 64))
    assert traffic_bytes(made) == 2 * 16 * 64 * 4 + 16 * 8


def test_tensors_in_lists_are_read() -> None:
    made = call(aten.cat.default, ([spec(4, 8), spec(4, 8)], 0), spec(8, 8))
    assert traffic_bytes(made) == 2 * 8 * 8 * 4


def test_seconds_are_the_longer_of_arithmetic_and_traffic(machine: Machine) -> None:
    big = call(aten.mm.default, (spec(64, 64), spec(64, 64)), spec(64, 64))
    assert roofline_seconds(big, machine) == flops_of(big)
    thin = call(aten.mm.default, (spec(1, 4), spec(4, 1)), spec(1, 1))
    assert roofline_seconds(thin, machine) == traffic_bytes(thin) == 36


def test_the_dtype_chooses_the_peak(machine: Machine) -> None:
    half = [spec(64, 64, dtype=torch.bfloat16)] * 3
    made = call(aten.mm.default, tuple(half[:2]), half[2])
    assert roofline_seconds(made, machine) == flops_of(made) / 2


def test_an_empty_op_costs_its_launch() -> None:
    machine = machine_named("a100-80gb")
    assert roofline_seconds(call(aten.neg.default, (spec(0, 8),), spec(0, 8)), machine) == machine.launch_seconds


def test_faster_machines_are_faster() -> None:
    made = call(aten.mm.default, (spec(2048, 2048), spec(2048, 2048)), spec(2048, 2048))
    names = ["cpu", "m40-12gb", "p100-16gb", "a100-40gb", "h100-80gb"]
    seconds = [roofline_seconds(made, machine_named(name)) for name in names]
    assert seconds == sorted(seconds, reverse=True)


def test_a_captured_node_can_be_priced() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4, device="meta")
    node = graph.call_function(aten.mm.default, (x, x))
    node.meta["val"] = torch.empty(4, 4, device="meta")
    assert flops_of(call_of(node)) == 2 * 4**3

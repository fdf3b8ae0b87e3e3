"""The catalogue: its names, its ranges, and a source for every number."""

from __future__ import annotations

import dataclasses

import pytest

from ebbtide.errors import UsageError
from ebbtide.step.machine import Machine, catalogue, machine_named

NAMES = [
    "cpu",
    "m40-12gb",
    "titanxp-12gb",
    "p100-12gb",
    "p100-16gb",
    "v100-16gb",
    "v100-32gb",
    "t4-16gb",
    "rtx4090-24gb",
    "a100-40gb",
    "a100-80gb",
    "h100-80gb",
    "h200-141gb",
]
CUDA = NAMES[1:]
NUMBERS = ["memory_bytes", "flops", "bytes_per_second", "launch_seconds", "granularity_bytes"]


def test_the_catalogue_has_exactly_the_documented_names() -> None:
    assert list(catalogue()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name: str) -> None:
    machine = machine_named(name)
    wanted = {*NUMBERS, "capability", "context_bytes", "fragmentation"} if machine.device == "cuda" else set(NUMBERS)
    for tier in machine.links:
        wanted |= {f"links.{tier}.{what}" for what in ("bytes_per_second", "latency_seconds", "capacity_bytes")}
    assert set(machine.sources) == wanted
    assert all(len(source) > 20 for source in machine.sources.values())


@pytest.mark.parametrize("name", CUDA)
def test_memory_is_a_little_below_the_name(name: str) -> None:
    nominal = int(name.rsplit("-", 1)[1].removesuffix("gb")) * 2**30
    assert 0.9 * nominal < machine_named(name).memory_bytes <= nominal


@pytest.mark.parametrize("name", CUDA)
def test_what_is_usable_is_memory_without_context_and_fragmentation(name: str) -> None:
    machine = machine_named(name)
    rest = machine.memory_bytes - machine.context_bytes
    assert machine.usable_bytes == int(0.95 * rest) < machine.memory_bytes - 700 * 2**20
    assert dataclasses.replace(machine, context_bytes=0, fragmentation=0.0).usable_bytes == machine.memory_bytes
    assert dataclasses.replace(machine, memory_bytes=2**20).usable_bytes == 0


def test_a_machine_of_an_earlier_plan_file_is_usable_as_a_whole() -> None:
    data = machine_named("t4-16gb").to_json()
    assert Machine.from_json(data) == machine_named("t4-16gb")
    del data["context_bytes"], data["fragmentation"]
    assert Machine.from_json(data).usable_bytes == machine_named("t4-16gb").memory_bytes
    with pytest.raises(ValueError, match="is not a share"):
        Machine.from_json({**data, "fragmentation": 1.5})


@pytest.mark.parametrize("name", CUDA)
def test_a_card_has_bfloat16_from_capability_8_on(name: str) -> None:
    machine = machine_named(name)
    assert machine.capability
    assert ("bfloat16" in machine.flops) == (machine.compute_capability >= (8, 0))


def test_a_custom_card_counts_as_capability_8() -> None:
    assert dataclasses.replace(machine_named("h100-80gb"), capability="").compute_capability == (8, 0)
    assert dataclasses.replace(machine_named("h100-80gb"), capability="12.1").compute_capability == (12, 1)


@pytest.mark.parametrize("name", CUDA)
def test_the_numbers_of_a_card_are_in_range(name: str) -> None:
    machine = machine_named(name)
    assert machine.device == "cuda"
    assert machine.granularity_bytes == 512
    assert 5e12 < machine.flops["float32"] < 1e14
    assert all(peak >= machine.flops["float32"] for peak in machine.flops.values())
    assert 2e11 < machine.bytes_per_second < 1e13
    assert 1e-6 < machine.launch_seconds < 1e-5
    host = machine.links["host"]
    assert 1e10 < host.in_bytes_per_second == host.out_bytes_per_second < machine.bytes_per_second / 10
    assert host.capacity_bytes > machine.memory_bytes


def test_only_cards_with_bfloat16_list_it() -> None:
    having = [name for name in NAMES if "bfloat16" in machine_named(name).flops]
    assert having == ["rtx4090-24gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb"]


def test_the_machine_at_hand_counts_requested_bytes_and_has_no_tiers() -> None:
    cpu = machine_named("cpu")
    assert (cpu.device, cpu.memory_bytes, cpu.links) == ("cpu", 0, {})
    assert cpu.round_up(1234567) == 1234567


@pytest.mark.parametrize(("count", "rounded"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_cuda_blocks_are_rounded_up(count: int, rounded: int) -> None:
    assert machine_named("t4-16gb").round_up(count) == rounded


def test_an_unknown_dtype_runs_at_the_rate_of_float32() -> None:
    machine = machine_named("v100-16gb")
    assert machine.flops_for("float16") == 125e12
    assert machine.flops_for("bfloat16") == machine.flops_for("float64") == 15.7e12


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(UsageError) as caught:
        machine_named("a100")
    assert "'a100'" in str(caught.value)
    assert all(name in str(caught.value) for name in NAMES)


def test_a_machine_can_be_varied() -> None:
    smaller = dataclasses.replace(machine_named("a100-40gb"), memory_bytes=2**30)
    assert isinstance(smaller, Machine)
    assert smaller.memory_bytes == 2**30

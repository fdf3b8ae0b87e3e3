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
    "rtx3060-12gb",
    "rtx3090-24gb",
    "rtx4080-16gb",
    "rtx4090-24gb",
    "rtx5090-32gb",
    "rtxa6000-48gb",
    "rtx6000ada-48gb",
    "a10g-24gb",
    "l4-24gb",
    "l40s-48gb",
    "a30-24gb",
    "a100-40gb",
    "a100-80gb",
    "h20-96gb",
    "h100-80gb",
    "h100nvl-94gb",
    "h200-141gb",
    "b200-180gb",
    "gb200-186gb",
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
    assert 5e12 < machine.flops["float32"] < 2e14
    assert all(peak >= machine.flops["float32"] for peak in machine.flops.values())
    assert 2e11 < machine.bytes_per_second < 1e13
    assert 1e-6 < machine.launch_seconds < 1e-5
    host = machine.links["host"]
    assert 1e10 < host.in_bytes_per_second == host.out_bytes_per_second < machine.bytes_per_second / 10
    assert host.capacity_bytes > machine.memory_bytes


def test_only_cards_with_bfloat16_list_it() -> None:
    having = [name for name in NAMES if "bfloat16" in machine_named(name).flops]
    assert having == NAMES[NAMES.index("rtx3060-12gb") :]


# Multiprocessors and boost clocks are a second way to the peaks: an Ampere, Ada or Blackwell multiprocessor of these
# cards has 128 float32 units. Tensor cores of GeForce cards and of the A10G give float16 with float32 accumulation at
# twice the rate of these units, those of professional cards at four times.
MULTIPROCESSORS = {
    "rtx3060-12gb": (28, 1.777e9, 2),
    "rtx3090-24gb": (82, 1.695e9, 2),
    "rtx4080-16gb": (76, 2.505e9, 2),
    "rtx4090-24gb": (128, 2.520e9, 2),
    "rtx5090-32gb": (170, 2.407e9, 2),
    "rtxa6000-48gb": (84, 1.800e9, 4),
    "rtx6000ada-48gb": (142, 2.505e9, 4),
    "a10g-24gb": (80, 1.710e9, 2),
    "l4-24gb": (58, 2.040e9, 4),
    "l40s-48gb": (142, 2.520e9, 4),
}


@pytest.mark.parametrize("name", MULTIPROCESSORS)
def test_peaks_are_those_of_multiprocessors_and_clock(name: str) -> None:
    count, clock, times = MULTIPROCESSORS[name]
    flops = machine_named(name).flops
    assert flops["float32"] == pytest.approx(count * 128 * 2 * clock, rel=0.01)
    assert flops["float16"] == flops["bfloat16"] == pytest.approx(times * flops["float32"], rel=0.02)


def test_cards_of_one_chip_are_ordered_as_they_are_sold() -> None:
    def peaks(name: str) -> tuple[float, float]:
        machine = machine_named(name)
        return machine.flops_for("bfloat16"), machine.bytes_per_second

    for less, more in [
        ("rtx3060-12gb", "rtx3090-24gb"),
        ("rtx4080-16gb", "rtx4090-24gb"),
        ("rtx4090-24gb", "rtx5090-32gb"),
        ("a10g-24gb", "rtxa6000-48gb"),
        ("l4-24gb", "l40s-48gb"),
        ("a30-24gb", "a100-40gb"),
        ("h20-96gb", "h200-141gb"),
        ("h100nvl-94gb", "h200-141gb"),
        ("h200-141gb", "b200-180gb"),
        ("b200-180gb", "gb200-186gb"),
    ]:
        assert all(a < b for a, b in zip(peaks(less), peaks(more), strict=True)), (less, more)


# Lanes' line rates in both directions together stand on datasheets: 32, 64 and 128 GB/s for sixteen lanes.
PCI_EXPRESS = {"3.0": 12.6e9, "4.0": 25.2e9, "5.0": 50.4e9}


@pytest.mark.parametrize("name", CUDA)
def test_the_link_is_that_of_its_generation_of_pci_express(name: str) -> None:
    machine = machine_named(name)
    source = machine.sources["links.host.bytes_per_second"]
    rate = machine.links["host"].out_bytes_per_second
    if name == "gb200-186gb":  # half of what Grace's memory gives both ways to each of two cards
        assert source.startswith("estimate: ")
        assert PCI_EXPRESS["5.0"] < rate < 512e9 / 4
        return
    generation = source.removeprefix("PCI Express Base Specification ").split(",")[0]
    assert rate == PCI_EXPRESS[generation]
    newest = {"7": "3.0", "6": "3.0", "5": "3.0", "8": "4.0", "9": "5.0", "10": "5.0", "12": "5.0"}
    assert generation == newest[machine.capability.split(".")[0]]


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

"""The host tier against a fake CUDA device that punishes a missing edge: every bug that offloaders had is a test.

The rows are those of a survey of offloading in other projects; named with each test. Rows about planning (small
tensors, peaks in the recomputation, meanings of a budget) are tested where plans are.
"""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch

from ebbtide.errors import TierError
from ebbtide.transfers import host
from ebbtide.transfers.arena import Arena
from ebbtide.transfers.host import HostTier, Slab
from ebbtide.transfers.slots import Slot, Space
from ebbtide.transfers.streams import Edge, bytes_of
from fake_cuda import FakeDevice, Race, Stream

CPU = torch.device("cpu")  # the fake's memory
ROOM = 600  # bytes of a buffer, less than two of the allocator's grains


def slots(count: int = 4, shape: tuple[int, ...] = (10, 15), stride: tuple[int, ...] = (15, 1)) -> tuple[Slot, ...]:
    space = Space({})
    size = torch.Size(shape).numel() * 4
    return tuple(
        Slot(i, f"b{i}", "host", space.take("host", size), size, shape, stride, torch.float32, CPU)
        for i in range(count)
    )


class Bench:
    """A device, its tier, and arenas on it."""

    last: Bench

    def __init__(self, device: FakeDevice, given: tuple[Slot, ...] | None = None) -> None:
        self.device = device
        self.tier = HostTier(device)
        self.slots = given or slots()
        Bench.last = self

    def arena(self, timed: bool = False) -> Arena:
        return Arena(self.slots, {"host": self.tier}, 0, timed)

    def made(self, index: int, value: int) -> torch.Tensor:
        """A buffer with bytes of ``value``, computed on the current stream."""
        tensor = self.slots[index].empty()
        self.device.write(tensor, value, f"making {index}")
        return tensor

    def scratch(self) -> None:
        """Something else is allocated, written, read and freed."""
        tensor = self.slots[0].empty()
        self.device.write(tensor, 0xAA, "something else")
        self.device.read(tensor, 0xAA, "something else")

    def out(self, arena: Arena, index: int, value: int) -> None:
        """Make a buffer, send it away and free it."""
        tensor = self.made(index, value)
        arena.offload(index, tensor)
        arena.settle(index, tensor)

    def back(self, arena: Arena, index: int, value: int) -> None:
        """Bring it back and read it."""
        tensor = arena.arrive(index, arena.reload(index))
        self.device.read(tensor, value, f"reading {index}")


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back is allocated on the fake device."""
    monkeypatch.setattr(Slot, "empty", lambda self: Bench.last.device.allocate(self))


# -- the edges ---------------------------------------------------------------------------------------------------


def left(bench: Bench) -> None:
    """Memory freed or used again before the copy out has ended (torchtune#1867, pytorch#180665, Megatron#6187)."""
    arena = bench.arena()
    bench.out(arena, 0, 1)
    bench.scratch()


def copied(bench: Bench) -> None:
    """The host's bytes are read while they are still written (Megatron#7398, torchtitan#2581)."""
    arena = bench.arena()
    tensor = bench.made(0, 1)
    arena.offload(0, tensor)
    other = arena.arrive(0, arena.reload(0))  # before the settle of the first: nothing else orders the two
    bench.device.read(other, 1)
    arena.settle(0, tensor)


def made(bench: Bench) -> None:
    """The copy starts before the kernel that makes the buffer has ended (trl#7195: queued after the wait)."""
    bench.out(bench.arena(), 0, 1)


def room(bench: Bench) -> None:
    """A way back into memory that a kernel which is still to run reads."""
    arena = bench.arena()
    bench.out(arena, 0, 1)
    bench.scratch()
    bench.back(arena, 0, 1)


def back(bench: Bench) -> None:
    """Read before the copy has arrived."""
    arena = bench.arena()
    bench.out(arena, 0, 1)
    bench.back(arena, 0, 1)


def slot(bench: Bench) -> None:
    """A slab used again while a copy of the step before still reads it."""
    for step in range(2):
        arena = bench.arena()
        bench.out(arena, 0, 1 + step)
        # The reader and the next step run on streams of their own: nothing but the slab connects them.
        with bench.device.on(Stream(f"backward {step}")):
            bench.back(arena, 0, 1 + step)
        arena.close()
    assert len(bench.device.pinned_sizes) == 1


def dropped(bench: Bench) -> None:
    """An exception between reload and arrive: the copy must not hit whoever has the memory next."""
    arena = bench.arena()
    bench.out(arena, 0, 1)
    coming = arena.reload(0)
    del coming
    bench.scratch()  # not the same memory: the arena keeps it
    arena.close()
    bench.scratch()


SCENARIOS: dict[Edge, Callable[[Bench], None]] = {
    Edge.LEFT: left,
    Edge.COPIED: copied,
    Edge.MADE: made,
    Edge.ROOM: room,
    Edge.BACK: back,
    Edge.SLOT: slot,
    Edge.DROPPED: dropped,
}


def test_every_edge_has_a_scenario() -> None:
    assert set(SCENARIOS) == set(Edge)


@pytest.mark.parametrize("edge", SCENARIOS, ids=lambda edge: edge.name)
def test_an_edge_holds(edge: Edge) -> None:
    for seed in range(5):
        device = FakeDevice(seed)
        SCENARIOS[edge](Bench(device))
        device.run()
        assert edge in device.used


@pytest.mark.parametrize("edge", SCENARIOS, ids=lambda edge: edge.name)
def test_without_an_edge_the_device_races(edge: Edge) -> None:
    for seed in range(5):
        device = FakeDevice(seed, without={edge})
        SCENARIOS[edge](Bench(device))
        with pytest.raises(Race, match="touch the same bytes"):
            device.run()


def test_a_missing_edge_shows_in_the_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake's order of execution is adversarial by itself: some order reads what is wrong."""
    monkeypatch.setattr(FakeDevice, "_refuse_races", lambda _: None)
    wrong = 0
    for seed in range(30):
        device = FakeDevice(seed, without={Edge.BACK})
        back(Bench(device))
        try:
            device.run()
        except Race:
            wrong += 1
    assert wrong


# -- streams -----------------------------------------------------------------------------------------------------


def elsewhere(bench: Bench) -> None:
    """A first step on the default stream, the next one on another that user code made current."""
    for stream in (bench.device.now, Stream("the user's")):
        with bench.device.on(stream):
            arena = bench.arena()
            bench.out(arena, 0, 1)
            bench.scratch()
            bench.back(arena, 0, 1)
            arena.close()


def test_the_stream_that_computes_is_the_live_one() -> None:
    """trl#7195: "the" compute stream was looked up once, and the user's streams were not it."""
    device = FakeDevice()
    elsewhere(Bench(device))
    device.run()
    device = FakeDevice(cached=True)
    elsewhere(Bench(device))
    with pytest.raises(Race):
        device.run()


def test_memory_goes_back_to_the_stream_that_it_is_of() -> None:
    """A copy is joined under another current stream than the one that its memory was allocated on."""
    device = FakeDevice()
    bench = Bench(device)
    arena = bench.arena()
    tensor = bench.made(0, 1)
    arena.offload(0, tensor)
    with device.on(Stream("the user's")):
        arena.settle(0, tensor)
    del tensor
    bench.scratch()
    device.run()


def test_side_streams_only_copy_and_nothing_is_allocated_on_them() -> None:
    """trl#7195: a clone made contiguous on the way. Whole storages are copied, whatever their strides."""
    device = FakeDevice()
    bench = Bench(device, slots(shape=(10, 15), stride=(1, 10)))
    arena = bench.arena()
    for index in range(4):
        bench.out(arena, index, 1 + index)
    before = len(device.allocated)
    for index in range(4):
        bench.back(arena, index, 1 + index)
    assert len(device.allocated) == before + 4
    assert {stream.name for stream in device.allocated} == {"compute"}
    assert {one.what for one in device.operations if one.stream.name in ("out", "in")} == {"copy out", "copy in"}
    device.run()


def test_a_square_transpose_comes_back_as_one() -> None:
    """ms-swift#10157: a view was told from another by its address alone, and a transpose became its transpose."""
    device = FakeDevice()
    bench = Bench(device, (slots(2, (8, 8), (8, 1))[0], slots(2, (8, 8), (1, 8))[1]))
    arena = bench.arena()
    values = torch.arange(64.0).reshape(8, 8)
    for index, slot in enumerate(bench.slots):
        laid = torch.empty_strided(slot.shape, slot.stride).copy_(values)
        tensor = slot.empty()
        device.write(tensor, bytes(bytes_of(laid).tolist()))
        arena.offload(index, tensor)
        arena.settle(index, tensor)
        coming = arena.arrive(index, arena.reload(index))
        device.run()
        assert torch.equal(coming, values)
        assert coming.stride() == slot.stride


def test_random_steps_have_no_race_and_the_right_bytes() -> None:
    """Offloads, settles, reloads and reads in any legal order, on two user streams, over several steps and slabs."""
    for seed in range(40):
        rng = random.Random(seed)
        device = FakeDevice(seed)
        bench = Bench(device)
        home, other = device.now, Stream("the user's")
        pending: list[tuple[Arena, int]] = []
        for step in range(3):
            with device.on(rng.choice([home, other])):
                here = device.now
                arena = bench.arena()
                base = 10 * (step + 1)
                leaving: list[tuple[int, torch.Tensor]] = []
                for index in rng.sample(range(4), 4):
                    tensor = bench.made(index, base + index)
                    arena.offload(index, tensor)
                    leaving.append((index, tensor))
                    del tensor
                    while leaving and rng.random() < 0.5:
                        arena.settle(*leaving.pop(rng.randrange(len(leaving))))
                    bench.scratch()
                while leaving:
                    arena.settle(*leaving.pop())
                pending.append((arena, base))
                if rng.random() < 0.6:  # else its backward comes later, after another forward
                    for arena, base in pending:
                        if device.now is not here:
                            device.after(here)
                        _backward(bench, arena, base, rng)
                        if rng.random() < 0.3:
                            _backward(bench, arena, base, rng)  # retained
                        arena.close()
                    pending.clear()
                bench.scratch()
        device.run()


def _backward(bench: Bench, arena: Arena, base: int, rng: random.Random) -> None:
    coming: list[tuple[int, torch.Tensor]] = []
    for index in rng.sample(range(4), rng.randint(1, 4)):
        coming.append((index, arena.reload(index)))
        while coming and rng.random() < 0.5:
            at, tensor = coming.pop(rng.randrange(len(coming)))
            bench.device.read(arena.arrive(at, tensor), base + at, f"backward {at}")
            del tensor
        bench.scratch()
    for at, tensor in coming:
        bench.device.read(arena.arrive(at, tensor), base + at, f"backward {at}")


# -- ends --------------------------------------------------------------------------------------------------------


def test_a_second_backward_copies_its_own_values() -> None:
    device = FakeDevice()
    bench = Bench(device)
    arena = bench.arena()
    for value in (1, 2, 3):
        bench.out(arena, 0, value)
        bench.back(arena, 0, value)
    device.run()


def test_what_a_dropped_arena_had_under_way_is_waited_for() -> None:
    """Nobody closes it: its finalizer does."""
    device = FakeDevice()
    bench = Bench(device)
    arena = bench.arena()
    tensor = bench.made(0, 1)
    arena.offload(0, tensor)
    watch = weakref.ref(tensor)
    del tensor
    assert watch() is not None, "its memory would be used again"
    del arena
    gc.collect()
    assert watch() is None
    bench.scratch()
    again = bench.arena()
    bench.out(again, 0, 2)
    bench.back(again, 0, 2)
    assert len(device.pinned_sizes) == 1, "its slab is not used again"
    device.run()


def test_a_buffer_is_let_go_as_soon_as_its_copy_is_joined() -> None:
    """The allocator's level is the simulator's: nothing is kept beyond its free, and no block waits for an event."""
    device = FakeDevice()
    bench = Bench(device)
    arena = bench.arena()
    bench.out(arena, 0, 1)
    assert device.live == 0
    tensor = arena.reload(0)
    tensor = arena.arrive(0, tensor)
    device.read(tensor, 1)
    assert device.live == 1024
    del tensor
    assert device.live == 0
    device.run()


def test_a_copy_that_cannot_be_issued_does_not_keep_its_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(FakeDevice())
    arena = bench.arena()
    tensor = bench.made(0, 1)

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bench.device, "copy", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        arena.offload(0, tensor)
    arena.close()
    assert len(bench.tier._free) == 1


# -- the host's memory -------------------------------------------------------------------------------------------


def test_memory_is_pinned_once_for_all_steps() -> None:
    """pytorch#186161, unsloth-zoo#1257: pinning takes long, and what torch has pinned it keeps."""
    device = FakeDevice()
    bench = Bench(device)
    for step in range(5):
        arena = bench.arena()
        bench.out(arena, 1, step)
        bench.back(arena, 1, step)
        arena.close()
    assert device.pinned_sizes == [4 * ROOM]
    device.run()


def test_where_pinning_is_refused_memory_is_pageable_and_that_is_said_once() -> None:
    device = FakeDevice(pinnable=100)
    bench = Bench(device)
    with pytest.warns(UserWarning, match=r"2\.35 KiB of pinned memory were refused \(CUDA error: out of memory\); the"):
        arena = bench.arena()
    bench.out(arena, 0, 1)
    bench.back(arena, 0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = bench.arena()
    bench.out(other, 0, 2)
    bench.back(other, 0, 2)
    device.run()


def test_a_power_of_two_that_does_not_fit_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_host_bytes", lambda: 3000)
    device = FakeDevice()
    with pytest.warns(UserWarning, match="pinned blocks are powers of two"):
        Bench(device).arena()
    assert device.pinned_sizes == []


def test_too_little_memory_of_the_host_is_said_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(FakeDevice())
    with monkeypatch.context() as short:
        short.setattr(host, "free_host_bytes", lambda: 2048)
        said = r"needs 2\.35 KiB .* 2\.00 KiB are free; .*Nothing of this step has run"
        with pytest.raises(TierError, match=said) as caught:
            bench.arena()
    assert caught.value.tier == "host"
    bench.arena()


def test_idle_slabs_are_given_up_for_a_step_that_needs_another(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(FakeDevice())
    bench.arena().close()
    (idle,) = bench.tier._free
    room = [8 * 2**20]
    monkeypatch.setattr(host, "free_host_bytes", lambda: room[0] if idle._memory is None else 0)
    assert bench.tier.region(6 * 2**20).size == 6 * 2**20
    assert idle._memory is None


def test_slots_have_version_counters_of_their_own() -> None:
    slab = Slab(torch.zeros(4 * ROOM, dtype=torch.uint8), pinned=False)
    one, two = (slab.place(each) for each in slots(2))
    before = two._version
    one.fill_(1)
    assert two._version == before
    assert one.numel() == ROOM
    assert int(two.sum()) == 0
    assert bytes_of(torch.zeros(3, 4).t()).numel() == 48


def test_seconds_are_taken_where_a_step_is_measured() -> None:
    device = FakeDevice()
    bench = Bench(device)
    plain, timed = bench.arena(), bench.arena(timed=True)
    for arena in (plain, timed):
        bench.out(arena, 0, 1)
        bench.back(arena, 0, 1)
        assert arena.traffic.out_bytes == arena.traffic.in_bytes == ROOM
    assert not plain.traffic.timed
    assert plain.traffic.hidden_share != plain.traffic.hidden_share, "nobody knows"
    timed.traffic.read_clocks()
    assert timed.traffic.timed
    assert timed.traffic.transfer_seconds > 0
    assert timed.traffic.waited_seconds > 0
    assert 0 <= timed.traffic.hidden_share <= 1
    device.run()


def test_what_the_host_has_free_is_some_of_what_it_has() -> None:
    free = host.free_host_bytes()
    assert free is not None
    assert 2**20 < free < 2**50

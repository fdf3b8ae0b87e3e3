"""The copies of one step: what comes back is what left, ends of all kinds, and faults in between."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ebbtide.errors import InternalError, TierError
from ebbtide.step.machine import Link
from ebbtide.transfers.arena import Arena, arena_numbered, current_arena, travelling
from ebbtide.transfers.disk import DiskTier, Region
from ebbtide.transfers.slots import Slot, Space, region_bytes

CPU = torch.device("cpu")
SHAPES = ((64, 32), (7,), (3, 5, 2))


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path)


def slots() -> tuple[Slot, ...]:
    space = Space({})
    found: list[Slot] = []
    for index, shape in enumerate(SHAPES):
        tensor = torch.empty(shape)
        size = tensor.nbytes
        offset = space.take("disk", size)
        found.append(Slot(index, f"b{index}", "disk", offset, size, shape, tensor.stride(), torch.float32, CPU))
    return tuple(found)


def idle_regions(tier: DiskTier) -> int:
    return len(tier._free)  # pyright: ignore[reportPrivateUsage]


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if true():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never happened")


def test_what_left_comes_back_any_number_of_times(tier: DiskTier):
    arena = Arena(slots(), {"disk": tier})
    given = [torch.randn(shape) for shape in SHAPES]
    for index, tensor in enumerate(given):
        arena.offload(index, tensor)
    for index, tensor in enumerate(given):
        arena.settle(index, tensor)
    for index in (2, 0, 1, 0):
        taken = arena.arrive(index, arena.reload(index))
        assert torch.equal(taken, given[index])
        assert taken.data_ptr() != given[index].data_ptr()
    traffic = arena.traffic
    assert traffic.out_bytes == sum(tensor.nbytes for tensor in given)
    assert traffic.in_bytes == traffic.out_bytes + given[0].nbytes
    assert traffic.transfer_seconds > 0
    assert 0 <= traffic.hidden_share <= 1


def test_a_way_back_waits_for_its_own_way_out(tier: DiskTier):
    gate = threading.Event()
    tier.lane.submit(gate.wait)
    arena = Arena(slots(), {"disk": tier})
    given = torch.randn(SHAPES[0])
    arena.offload(0, given)
    coming = arena.reload(0)
    gate.set()
    assert torch.equal(arena.arrive(0, coming), given)


def test_a_second_backward_copies_its_own_values(tier: DiskTier):
    """Of a retained graph: what the backward itself makes is another each time."""
    arena = Arena(slots(), {"disk": tier})
    for _ in range(3):
        given = torch.randn(SHAPES[0])
        arena.offload(0, given)
        arena.settle(0, given)
        assert torch.equal(arena.arrive(0, arena.reload(0)), given)


def test_its_region_is_given_back_once_nothing_is_under_way(tier: DiskTier):
    arena = Arena(slots(), {"disk": tier})
    gate = threading.Event()
    tier.lane.submit(gate.wait)
    arena.offload(0, torch.randn(SHAPES[0]))
    arena.close()
    assert idle_regions(tier) == 0
    gate.set()
    wait_until(lambda: idle_regions(tier) == 1)
    arena.close()
    assert idle_regions(tier) == 1
    with pytest.raises(TierError, match="is gone: its backward has run already"):
        arena.reload(0)


def test_an_arena_that_nobody_has_any_more_gives_its_region_back(tier: DiskTier):
    arena = Arena(slots(), {"disk": tier}, 7)
    assert arena_numbered(7) is arena
    arena.offload(0, torch.randn(SHAPES[0]))
    del arena
    gc.collect()
    wait_until(lambda: idle_regions(tier) == 1)
    assert arena_numbered(7) is None


def test_two_arenas_share_nothing(tier: DiskTier):
    one, two = Arena(slots(), {"disk": tier}), Arena(slots(), {"disk": tier})
    a, b = torch.randn(SHAPES[0]), torch.randn(SHAPES[0])
    one.offload(0, a)
    two.offload(0, b)
    assert torch.equal(one.arrive(0, one.reload(0)), a)
    assert torch.equal(two.arrive(0, two.reload(0)), b)


@pytest.mark.parametrize("way", ["write", "read"])
def test_a_transfer_that_fails_is_said_where_it_is_waited_for(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, way: str
):
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Region, way, fail)
    arena = Arena(slots(), {"disk": tier})
    tensor = torch.randn(SHAPES[0])
    arena.offload(0, tensor)
    expected = r"b0 .*the disk tier failed: Input/output error, in a file in .*No gradient of this step was handed out"
    if way == "write":
        with pytest.raises(TierError, match=expected):
            arena.settle(0, tensor)
    with pytest.raises(TierError, match="Input/output error"):
        arena.arrive(0, arena.reload(0))
    arena.close()
    wait_until(lambda: idle_regions(tier) == 1)


def test_a_region_in_which_a_copy_failed_is_not_used_again(tier: DiskTier, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    arena = Arena(slots(), {"disk": tier})
    tensor = torch.randn(SHAPES[0])
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        arena.offload(0, tensor)
        with pytest.raises(TierError):
            arena.settle(0, tensor)
    arena.close()
    assert idle_regions(tier) == 0
    again = Arena(slots(), {"disk": tier})
    again.offload(0, tensor)
    again.settle(0, tensor)
    assert torch.equal(again.arrive(0, again.reload(0)), tensor)


def test_an_interrupted_issue_does_not_give_a_region_to_others(tier: DiskTier, monkeypatch: pytest.MonkeyPatch):
    submit, going_on = tier.lane.submit, threading.Event()

    def interrupted(work: Callable[[], object], then: Callable[[], None]) -> None:
        submit(lambda: going_on.wait(10) and work(), then)
        raise KeyboardInterrupt

    arena = Arena(slots(), {"disk": tier})
    region = weakref.ref(arena._regions.of["disk"])  # pyright: ignore[reportPrivateUsage]
    with monkeypatch.context() as patched:
        patched.setattr(tier.lane, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            arena.offload(0, torch.randn(SHAPES[0]))
    arena.close()
    assert idle_regions(tier) == 0
    assert region() is not None, "a copy to it may be under way"
    going_on.set()
    submit(lambda: None).wait()
    wait_until(lambda: gc.collect() >= 0 and region() is None)
    assert idle_regions(tier) == 0


def test_a_finalizer_may_close_an_arena_while_its_thread_is_at_its_regions(tier: DiskTier):
    arena = Arena(slots(), {"disk": tier})

    def collected() -> None:
        with arena._regions._lock:  # pyright: ignore[reportPrivateUsage]
            arena.close()

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert idle_regions(tier) == 1


def test_an_error_keeps_no_tensor_alive(tier: DiskTier, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Region, "write", fail)
    arena = Arena(slots(), {"disk": tier})
    tensor = torch.randn(SHAPES[0])
    watch = weakref.ref(tensor)
    arena.offload(0, tensor)
    with pytest.raises(TierError) as caught:
        arena.settle(0, tensor)
    kept = caught.value.with_traceback(None)
    del tensor, caught
    gc.collect()
    assert watch() is None
    assert kept.tier == "disk"


def test_a_tensor_that_is_not_its_slots_is_a_fault_of_ours(tier: DiskTier):
    arena = Arena(slots(), {"disk": tier})
    with pytest.raises(InternalError, match="has 8 bytes"):
        arena.offload(0, torch.zeros(2))
    with pytest.raises(InternalError, match="never left"):
        arena.reload(1)
    with pytest.raises(InternalError, match="was not sent for"):
        arena.arrive(1, torch.zeros(7))


def test_a_forked_child_does_not_touch_what_its_parent_moved(tier: DiskTier):
    arena = Arena(slots(), {"disk": tier})
    given = torch.randn(SHAPES[0])
    arena.offload(0, given)
    arena.settle(0, given)
    child = os.fork()
    if not child:
        ended = 1
        try:
            try:
                arena.reload(0)
            except TierError as error:
                own = Arena(slots(), {"disk": tier})
                other = torch.full(SHAPES[0], 3.0)
                own.offload(0, other)
                same = torch.equal(own.arrive(0, own.reload(0)), other)
                ended = 0 if same and "was forked" in str(error) else 2
        finally:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(arena.arrive(0, arena.reload(0)), given)


def test_a_forked_child_leaves_the_regions_of_its_parent_alone(tier: DiskTier):
    """Were one given back in the child, its next step would write over what the parent has moved."""
    arena = Arena(slots(), {"disk": tier})
    given = torch.randn(SHAPES[0])
    arena.offload(0, given)
    arena.settle(0, given)
    child = os.fork()
    if not child:
        ended = 1
        try:
            arena.close()
            own = Arena(slots(), {"disk": tier})
            other = torch.full(SHAPES[0], 3.0)
            own.offload(0, other)
            own.settle(0, other)
            ended = 0
        finally:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(arena.arrive(0, arena.reload(0)), given)


def test_a_thread_has_its_own_current_arena(tier: DiskTier):
    one, two = Arena(slots(), {"disk": tier}), Arena(slots(), {"disk": tier})
    seen: list[bool] = []
    with travelling(one):
        with travelling(two):
            assert current_arena() is two
        assert current_arena() is one

        def elsewhere() -> None:
            with pytest.raises(InternalError, match="outside of a pending step"):
                current_arena()
            seen.append(True)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seen == [True]


def test_places_are_aligned_and_a_region_ends_with_the_last(tier: DiskTier):
    space = Space({"disk": Link("disk", 1, 1.0, 1.0, alignment_bytes=4096)})
    assert [space.take("disk", size) for size in (1, 4096, 4097, 5)] == [0, 4096, 8192, 16384]
    assert region_bytes(slots()) == {"disk": sum(4 * torch.Size(shape).numel() for shape in SHAPES)}

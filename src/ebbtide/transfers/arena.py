"""The copies of one step in flight: what the lowered graphs call to send buffers away and bring them back.

1. An *arena* belongs to one forward and its backward. It holds a region of each tier that its plan uses, until its
   backward has ended without retaining the graph, or until nobody can run that backward any more.
2. ``offload`` issues the copy of a buffer; ``settle``, which stands where the plan frees the buffer first, waits for
   it; ``reload`` allocates the buffer and issues the way back; ``arrive``, which stands before the first reader, waits
   for that. The calling thread allocates and drops every tensor. What waits is that thread on CPU, and the stream on
   which it computes on CUDA: how is known to the tier (``ways``).
3. A way back comes after its own way out. A copy that is made once more, by another backward of a retained graph, comes
   after the ways back of the copy before it.
4. A region is given back once no copy to or from it is under way, by whoever sees that last. Where an interruption
   leaves open whether a copy has been issued, it is not used again: it goes with the last copy that knows it.
5. An arena is used in the process that made it. In one that was forked from it, its regions are nobody's.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ebbtide.errors import InternalError, TierError
from ebbtide.transfers.paths import Block, Copy, TransferPath
from ebbtide.transfers.slots import Slot, region_bytes
from ebbtide.transfers.traffic import Traffic

__all__ = ["Arena", "arena_numbered", "current_arena", "gone", "travelling"]


class _Regions:
    """The regions of an arena, given back once it is closed and no job uses them (definition 4)."""

    def __init__(self, tiers: Mapping[str, TransferPath], sizes: Mapping[str, int]) -> None:
        self._tiers = tiers
        self._process = os.getpid()
        self._lock = threading.RLock()  # a finalizer may close them while this very thread is here
        self._closed = False
        self._unsure = False
        self._under_way = 0
        self.of: dict[str, Block] = {}
        try:
            for tier, size in sizes.items():
                self.of[tier] = tiers[tier].region(size)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def used(self) -> Generator[Callable[[], None], None, None]:
        """A copy is issued inside; gives what it calls once it uses them no more."""
        with self._lock:
            self._under_way += 1
        under_way = [self]

        def end() -> None:
            try:
                under_way.pop()
            except IndexError:
                return  # it has ended already
            self._end()

        try:
            yield end
        except Exception:
            end()  # it was not issued
            raise
        except BaseException:
            self._unsure = True
            end()
            raise

    def _end(self) -> None:
        """A copy uses them no more. Called by its lane's thread."""
        with self._lock:
            self._under_way -= 1
            unused = self._closed and not self._under_way
        if unused:
            self._give_back()

    def close(self) -> None:
        """The arena needs them no more."""
        if os.getpid() != self._process:
            self.of = {}
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unused = not self._under_way
        if unused:
            self._give_back()

    def _give_back(self) -> None:
        regions, self.of = self.of, {}
        if self._unsure:
            return
        for tier, region in regions.items():
            self._tiers[tier].give_back(region)


class Arena:
    """The copies of one step under way (definition 1).

    Args:
        slots: of the plan.
        tiers: by name, those that the slots are in.
        number: of the pending step.
        timed: whether seconds are taken even where that costs something.

    Attributes:
        traffic: what has moved.

    Raises:
        TierError: if a tier has no room.
    """

    def __init__(
        self, slots: Sequence[Slot], tiers: Mapping[str, TransferPath], number: int = 0, timed: bool = False
    ) -> None:
        self._slots = slots
        self._tiers = tiers
        self._process = os.getpid()
        self._regions = _Regions(tiers, region_bytes(slots))
        self._out: list[Copy | None] = [None] * len(slots)
        self._in: list[Copy | None] = [None] * len(slots)
        self._timed = timed
        self.traffic = Traffic(timed=timed or all(tiers[slot.tier].always_timed for slot in slots))
        self._finalizer = weakref.finalize(self, self._regions.close)
        self._finalizer.atexit = False
        if number:
            _arenas[number] = self

    # -- what the graphs call (definition 2) -------------------------------------------------------------------

    def offload(self, index: int, tensor: torch.Tensor) -> None:
        """Issue the copy of ``tensor`` to its slot."""
        slot, region = self._place(index)
        storage = tensor.untyped_storage()
        if storage.nbytes() != slot.bytes or tensor.storage_offset() or storage.device.type != slot.device.type:
            raise InternalError(
                f"{slot.name} has {storage.nbytes()} bytes from {tensor.storage_offset()} on, its slot {slot.bytes}"
            )
        self._wait(self._in[index])  # definition 3
        self._in[index] = None
        with self._regions.used() as end:
            self._out[index] = self._tiers[slot.tier].send(region, slot, tensor, end, timed=self._timed)
        self.traffic.out_bytes += slot.bytes

    def settle(self, index: int, tensor: torch.Tensor) -> None:
        """Wait until ``tensor``, which is given so that its last use is here, has been copied."""
        slot, region = self._place(index)
        job = self._out[index]
        self._wait(job)
        if job is None or job.failure:
            raise region.failure(f"moving {slot.name} to the {slot.tier} tier", "" if job is None else job.failure)

    def reload(self, index: int) -> torch.Tensor:
        """A tensor like the one that left, its bytes on their way."""
        slot, region = self._place(index)
        out = self._out[index]
        if out is None:
            raise InternalError(f"{slot.name} comes back and never left")
        tensor = slot.empty()
        if tensor.untyped_storage().nbytes() != slot.bytes:
            raise InternalError(f"{slot.name} comes back with other bytes than the {slot.bytes} of its slot")

        with self._regions.used() as end:
            self._in[index] = self._tiers[slot.tier].fetch(region, slot, tensor, out, end, timed=self._timed)
        self.traffic.in_bytes += slot.bytes
        return tensor

    def arrive(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which :meth:`reload` gave, once its bytes are there."""
        slot, region = self._place(index)
        job = self._in[index]
        if job is None:
            raise InternalError(f"{slot.name} arrives and was not sent for")
        self._wait(job)
        if job.failure:
            raise region.failure(f"bringing {slot.name} back from the {slot.tier} tier", job.failure)
        return tensor

    # -- ends ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Nobody needs the copies any more."""
        for job in (*self._out, *self._in):
            if job is not None:
                job.cancel()
        self._finalizer()

    def _place(self, index: int) -> tuple[Slot, Block]:
        slot = self._slots[index]
        if os.getpid() != self._process:
            raise TierError(
                "this process was forked between a forward and its backward, and what the forward moved to the "
                f"{slot.tier} tier stayed with the process that ran it; run the forward again in this one",
                tier=slot.tier,
            )
        region = self._regions.of.get(slot.tier)
        if region is None:
            raise gone(slot.tier)
        return slot, region

    def _wait(self, job: Copy | None) -> None:
        if job is not None:
            job.join(self.traffic)


def gone(tier: str) -> TierError:
    """What to raise where the copies are there no more."""
    return TierError(
        f"what this step moved to the {tier} tier is gone: its backward has run already, without "
        "retain_graph=True, or its forward is one of too many whose backward has not come",
        tier=tier,
    )


_arenas: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()


def arena_numbered(number: int) -> Arena | None:
    """The arena of a pending step, if that is alive and moves anything."""
    return _arenas.get(number)


class _Current(threading.local):
    arena: Arena | None = None


_current = _Current()


@contextmanager
def travelling(arena: Arena | None) -> Generator[None, None, None]:
    """While open, graphs that this thread runs move buffers through ``arena``."""
    before, _current.arena = _current.arena, arena
    try:
        yield
    finally:
        _current.arena = before


def current_arena() -> Arena:
    """The arena of the step that this thread runs."""
    if _current.arena is None:
        raise InternalError("a step that moves buffers runs outside of a pending step")
    return _current.arena

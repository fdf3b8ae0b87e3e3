"""The disk tier of a CUDA device: through a piece of pinned memory to a file, and back.

1. The disk's lane moves one piece after the other: a side stream copies it, the lane's thread waits for that and writes
   it, or the other way round. The seconds of disk and link add up; those of the disk are most of them by far.
2. Only the lane knows when the disk is done, so the thread that computes waits for it, as on CPU. By then the device is
   done as well, and whatever stream is current may go on.
3. A copy out comes after what the stream that computes had been given when it was issued, a copy back after what had
   the memory before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ebbtide.transfers.disk import DiskTier, Region, disk_tier
from ebbtide.transfers.host import HostTier, Slab, host_tier
from ebbtide.transfers.lane import Job
from ebbtide.transfers.slots import Slot
from ebbtide.transfers.streams import Edge, bytes_of

__all__ = ["StagedDisk", "staged_disk"]

_PIECE_BYTES = 16 * 2**20


class StagedDisk:
    """A disk tier that a card reaches through pinned memory (definition 1).

    Args:
        disk: the tier of the directory.
        host: gives the pinned memory, and the port to the device.
    """

    name = "disk"
    always_timed = True

    def __init__(self, disk: DiskTier, host: HostTier) -> None:
        self.disk = disk
        self.host = host
        self._streams = host.streams
        self._piece: Slab | None = None

    def region(self, size: int) -> Region:
        """A region on disk, with pinned memory for its pieces.

        Raises:
            TierError: if the disk has no room for it, or the host none for a piece.
        """
        if self._piece is None:
            self._piece = self.host.region(_PIECE_BYTES)
        return self.disk.region(size)

    def give_back(self, region: Region) -> None:
        """Nobody uses ``region`` any more. May be called from a finalizer."""
        self.disk.give_back(region)

    def send(self, region: Region, slot: Slot, tensor: torch.Tensor, then: Callable[[], None], *, timed: bool) -> Job:
        """Issue the copy of ``tensor`` to its slot."""
        streams, piece = self._streams, self._memory()
        made = streams.record(streams.current(tensor.device))

        def write() -> None:
            side = streams.side(tensor.device, "out")
            streams.wait(side, made, Edge.MADE)
            for begin, size in _pieces(slot.bytes):
                streams.copy(bytes_of(piece, 0, size), bytes_of(tensor, begin, size), side)
                streams.finish(streams.record(side))
                region.write(slot.offset + begin, piece, size)

        return self.disk.lane.submit(write, then)

    def fetch(
        self, region: Region, slot: Slot, tensor: torch.Tensor, out: Job, then: Callable[[], None], *, timed: bool
    ) -> Job:
        """Issue the way back of ``out`` into ``tensor``, which was allocated on the stream that is current."""
        streams, piece = self._streams, self._memory()
        room = streams.record(streams.current(tensor.device))

        def read() -> None:
            out.wait()
            if out.failure:
                raise RuntimeError(out.failure)
            side = streams.side(tensor.device, "in")
            streams.wait(side, room, Edge.ROOM)
            for begin, size in _pieces(slot.bytes):
                region.read(slot.offset + begin, piece, size)
                streams.copy(bytes_of(tensor, begin, size), bytes_of(piece, 0, size), side)
                streams.finish(streams.record(side))

        return self.disk.lane.submit(read, then)

    def _memory(self) -> torch.Tensor:
        assert self._piece is not None, "a region is there before its copies"
        return self._piece.memory


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(_PIECE_BYTES, size - begin)) for begin in range(0, size, _PIECE_BYTES))


_tiers: weakref.WeakValueDictionary[Path, StagedDisk] = weakref.WeakValueDictionary()


def staged_disk(directory: Path) -> StagedDisk:
    """The tier of ``directory`` for CUDA devices, one per process: its lane's thread has one piece."""
    return _tiers.setdefault(directory, StagedDisk(disk_tier(directory), host_tier()))

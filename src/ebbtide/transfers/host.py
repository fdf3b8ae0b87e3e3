"""The host tier of a CUDA device: memory of the host, reached by the device itself over side streams.

1. A *slab* is a region of this tier: one block of pinned memory for the copies of one step in flight, of the size that
   the plan knows. Pinning takes long, so slabs are used again. Torch's allocator rounds pinned blocks up to a power of
   two. Where pinning is refused a slab is pageable; this is said once. The host then waits for each copy.
2. Nothing here waits on the host: what has to come before what is said to the streams (``streams.Edge``). A copy out
   comes after what the stream that computes had been given when it was issued; a copy back also after its own copy out,
   and after what had the memory before, which may be under way still. A free block goes to whoever allocates next on
   its stream: so the tensor is kept until that stream has been told to wait.
3. A copy that nobody has joined when its step ends is *dropped*: the stream that its tensor belongs to waits for it,
   and the tensor goes. A slab that is used again is not written before the copies of the step before have ended.
4. Streams are asked for when they are needed, and a tensor belongs to the one that was current when its copy was
   issued. Where another one is current when the copy is joined, both wait.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ebbtide.errors import TierError
from ebbtide.faults import users_level
from ebbtide.transfers.paths import Pool
from ebbtide.transfers.slots import Slot
from ebbtide.transfers.streams import CUDA, Edge, Streams, bytes_of
from ebbtide.transfers.traffic import Traffic
from ebbtide.units import format_bytes

__all__ = ["Crossing", "HostTier", "Slab", "free_host_bytes", "host_tier"]


class Slab:
    """Pinned memory for the copies of one step (definition 1).

    Args:
        memory: its bytes.
        pinned: whether the device reaches them by itself.
    """

    def __init__(self, memory: torch.Tensor, *, pinned: bool) -> None:
        self.size = memory.numel()
        self.pinned = pinned
        self._memory: torch.Tensor | None = memory
        self.under_way: set[Crossing] = set()
        self.last: dict[Any, Any] = {}  # by side stream, the end of its last copy
        self.fences: tuple[Any, ...] = ()

    @property
    def memory(self) -> torch.Tensor:
        """All of its bytes."""
        assert self._memory is not None, "the slab is closed"
        return self._memory

    def place(self, slot: Slot) -> torch.Tensor:
        """The bytes of a slot."""
        return bytes_of(self.memory, slot.offset, slot.bytes)

    def end(self) -> None:
        """End the step: its memory may be used again (definition 3)."""
        for each in list(self.under_way):
            with contextlib.suppress(RuntimeError):  # of a device that is lost; finalizers come here
                each.drop()
        self.fences, self.last = tuple(self.last.values()), {}

    def close(self) -> None:
        """Give its memory back; torch's allocator keeps pinned blocks until the copies that use them have ended."""
        self._memory = None

    def failure(self, what: str, why: str) -> TierError:
        """What to raise where a copy failed."""
        return TierError(
            f"{what} failed: {why}. No gradient of this step was handed out. Run the step again; if it fails again, "
            "leave the host out of tiers",
            tier="host",
        )


class Crossing:
    """A copy one way or the other.

    Args:
        streams: the port.
        slab: where the copy is.
        tensor: of the device; kept until the copy is joined or dropped.
        edge: what joining the copy is for.
        done: the copy's end.
        begin: its beginning, if it is timed.
    """

    __slots__ = ("_begin", "_edge", "_home", "_slab", "_streams", "_tensor", "done")

    failure = ""  # an asynchronous error of CUDA is raised by the runtime, wherever it is seen

    def __init__(self, streams: Streams, slab: Slab, tensor: torch.Tensor, edge: Edge, done: Any, begin: Any) -> None:
        self._streams = streams
        self._slab = slab
        self._tensor: torch.Tensor | None = tensor
        self._edge = edge
        self._home = streams.current(tensor.device)
        self._begin = begin
        self.done = done
        slab.under_way.add(self)

    def join(self, traffic: Traffic) -> None:
        """Make the stream wait for the copy (definitions 2 and 4). The second time it does nothing."""
        if self._tensor is None:
            return
        streams, begin = self._streams, self._begin
        now = streams.current(self._tensor.device)
        before = None if begin is None else streams.record(now, timed=True)
        streams.wait(now, self.done, self._edge)
        if begin is not None:
            after, done = streams.record(now, timed=True), self.done
            traffic.add_later("transfer", lambda: streams.seconds(begin, done))
            traffic.add_later("waited", lambda: streams.seconds(before, after))
        if now != self._home:
            streams.wait(self._home, self.done, self._edge)
        self._forget()

    def drop(self) -> None:
        """Let the tensor go once its stream has waited for the copy (definition 3)."""
        if self._tensor is not None:
            self._streams.wait(self._home, self.done, Edge.DROPPED)
            self._forget()

    def cancel(self) -> None:
        """Nobody needs it; what the device has been given it does. Its slab drops it."""

    def _forget(self) -> None:
        self._slab.under_way.discard(self)
        self._tensor = None


class HostTier(Pool[Slab]):
    """The slabs of one process.

    Args:
        streams: the port to the device.
    """

    name = "host"
    always_timed = False

    def __init__(self, streams: Streams = CUDA) -> None:
        super().__init__()
        self.streams = streams
        self._said = False

    def _make(self, size: int) -> Slab:
        free = free_host_bytes()
        if free is not None and size > free:
            raise TierError(
                f"the host tier needs {format_bytes(size)} of the host's memory for one step, and {format_bytes(free)} "
                "are free; end other processes, use a larger budget, or move to a disk: tiers=['disk']. Nothing of "
                "this step has run",
                tier="host",
            )
        try:
            if free is not None and 1 << max(size - 1, 0).bit_length() > free:
                raise RuntimeError(f"pinned blocks are powers of two, and {format_bytes(free)} are free")
            return Slab(self.streams.pinned(size), pinned=True)
        except RuntimeError as error:
            self._say(size, str(error).partition("\n")[0])
        try:
            return Slab(torch.empty(size, dtype=torch.uint8), pinned=False)
        except (RuntimeError, MemoryError):
            raise TierError(
                f"the host tier could not be given {format_bytes(size)} of the host's memory; end other processes, use "
                "a larger budget, or move to a disk: tiers=['disk']. Nothing of this step has run",
                tier="host",
            ) from None

    def _say(self, size: int, why: str) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                f"{format_bytes(size)} of pinned memory were refused ({why}); the host tier uses pageable memory, for "
                "which the host waits at every transfer. Steps stay right and take longer than planned",
                stacklevel=users_level(),
            )

    def give_back(self, region: Slab) -> None:
        """Nobody uses ``region`` any more. May be called from a finalizer."""
        region.end()
        super().give_back(region)

    def send(
        self, region: Slab, slot: Slot, tensor: torch.Tensor, then: Callable[[], None], *, timed: bool
    ) -> Crossing:
        """Issue the copy of ``tensor`` to its slot."""
        streams, device = self.streams, tensor.device
        made = streams.record(streams.current(device))
        side = streams.side(device, "out")
        streams.wait(side, made, Edge.MADE)
        for fence in region.fences:
            streams.wait(side, fence, Edge.SLOT)
        return self._copy(region, tensor, side, Edge.LEFT, (region.place(slot), bytes_of(tensor)), then, timed)

    def fetch(
        self,
        region: Slab,
        slot: Slot,
        tensor: torch.Tensor,
        out: Crossing,
        then: Callable[[], None],
        *,
        timed: bool,
    ) -> Crossing:
        """Issue the way back of ``out`` into ``tensor``, which was allocated on the stream that is current."""
        streams, device = self.streams, tensor.device
        room = streams.record(streams.current(device))
        side = streams.side(device, "in")
        streams.wait(side, room, Edge.ROOM)
        streams.wait(side, out.done, Edge.COPIED)
        return self._copy(region, tensor, side, Edge.BACK, (bytes_of(tensor), region.place(slot)), then, timed)

    def _copy(
        self,
        region: Slab,
        tensor: torch.Tensor,
        side: Any,
        edge: Edge,
        ends: tuple[torch.Tensor, torch.Tensor],
        then: Callable[[], None],
        timed: bool,
    ) -> Crossing:
        streams = self.streams
        begin = streams.record(side, timed=True) if timed else None
        streams.copy(*ends, side)
        done = region.last[side] = streams.record(side, timed=timed)
        crossing = Crossing(streams, region, tensor, edge, done, begin)
        then()  # the slab has fences of its own
        return crossing


_tier: list[HostTier] = []


def host_tier() -> HostTier:
    """The host tier of this process."""
    if not _tier:
        _tier.append(HostTier())
    return _tier[0]


def free_host_bytes() -> int | None:
    """What the system can still give of the host's memory, as far as it and the control group say; ``None`` if not."""
    found = [_available(), _group_room(Path("/sys/fs/cgroup"))]
    return min((each for each in found if each is not None), default=None)


def _available() -> int | None:
    try:
        rows = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _group_room(directory: Path) -> int | None:
    try:
        most, used = (int((directory / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return max(most - used + _reclaimable(directory), 0)


def _reclaimable(directory: Path) -> int:
    """Bytes of files in the page cache, which the system takes back first."""
    try:
        rows = (directory / "memory.stat").read_text().splitlines()
        return next(int(row.split()[1]) for row in rows if row.startswith("inactive_file "))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0

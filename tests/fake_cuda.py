"""A deterministic CUDA device: streams, events and a caching allocator that punish a missing edge.

1. Nothing that a stream is given runs until the end (:meth:`FakeDevice.run`): the host is always ahead, as it may be.
   Then any stream may go next, as a seed decides; only the order within a stream and waits for events hold.
2. A block is handed out again as soon as its last tensor is gone, to whoever allocates next on its stream, and filled
   by garbage on that stream.
3. Every access to bytes is recorded with what comes before it for certain. Two accesses to the same bytes, one of them
   a write, neither of which comes before the other, are a *race*, whatever the order in which they ran: that makes the
   fake exact and not a matter of luck.
4. ``without`` takes edges away, so that each can be shown to be needed; ``cached`` answers with the stream that was
   current first.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ebbtide.transfers.slots import Slot
from ebbtide.transfers.streams import Edge

__all__ = ["FakeDevice", "Race", "Stream"]

_GRAIN = 512


class Race(AssertionError):
    """Definition 3, or bytes that are not those that were expected."""


@dataclass(eq=False)
class Stream:
    """A queue."""

    name: str
    last: int = 0  # mask of the operations that come before whatever is given next


@dataclass
class Operation:
    """One entry of a queue.

    Attributes:
        stream: its queue.
        what: in words.
        before: mask of the operations that come before it for certain.
        reads: ranges of addresses.
        writes: likewise.
        work: what it does when it runs.
    """

    stream: Stream
    what: str
    before: int
    reads: tuple[range, ...] = ()
    writes: tuple[range, ...] = ()
    work: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Event:
    """Comes after what its stream had been given."""

    after: int
    timed: bool


@dataclass
class FakeDevice:
    """Definitions 1 to 4; it is a port (``transfers.streams.Streams``) as well.

    Attributes:
        seed: of the order in which things run.
        without: edges that are left out.
        cached: whether the current stream is looked up once only.
        pinnable: bytes that may be pinned.
        may_wait: whether the host may wait for an event. What it does then is no part of definition 3.
    """

    seed: int = 0
    without: Collection[Edge] = ()
    cached: bool = False
    pinnable: int = 1 << 40
    may_wait: bool = False
    operations: list[Operation] = field(default_factory=list[Operation])
    now: Stream = field(default_factory=lambda: Stream("compute"))
    allocated: list[Stream] = field(default_factory=list[Stream])
    pinned_sizes: list[int] = field(default_factory=list[int])
    _sides: dict[str, Stream] = field(default_factory=dict[str, Stream])
    _first: Stream | None = None
    _free: dict[tuple[str, int], list[int]] = field(default_factory=dict[tuple[str, int], "list[int]"])
    _all: list[Any] = field(default_factory=list[Any])
    live: int = 0
    used: set[Edge] = field(default_factory=set[Edge])
    _done: int = 0
    _lock: Any = field(default_factory=threading.RLock)

    # -- as the port -----------------------------------------------------------------------------------------

    def current(self, device: torch.device) -> Stream:
        """The stream that is current."""
        self._first = self._first or self.now
        return self._first if self.cached else self.now

    def side(self, device: torch.device, way: Literal["out", "in"]) -> Stream:
        """A stream of its own per way."""
        return self._sides.setdefault(way, Stream(way))

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """An event."""
        return Event(stream.last, timed)

    def wait(self, stream: Stream, event: Event, edge: Edge) -> None:
        """An edge, unless it is left out."""
        self.used.add(edge)
        if edge not in self.without:
            stream.last |= event.after

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """A copy of bytes."""
        count = to.numel()
        assert source.numel() == count
        to_at, from_at = to.data_ptr(), source.data_ptr()  # addresses only: the device keeps no tensor alive
        self._give(
            stream,
            f"copy {stream.name}",
            (range(from_at, from_at + count),),
            (range(to_at, to_at + count),),
            lambda: ctypes.memmove(to_at, from_at, count) and None,
        )

    def finish(self, event: Event) -> None:
        """Run what comes before it, as late as that may be."""
        if not self.may_wait:
            raise AssertionError("the host waits for the device")
        with self._lock:
            self._execute(event.after)

    def seconds(self, begin: Event, end: Event) -> float:
        """Operations in between."""
        if self.may_wait:
            self.finish(end)
        assert begin.timed
        assert end.timed
        return float((end.after & ~begin.after).bit_count())

    def pinned(self, size: int) -> torch.Tensor:
        """Memory of the host, kept until the end as by torch's allocator."""
        if size > self.pinnable:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        self.pinned_sizes.append(size)
        tensor = torch.zeros(size, dtype=torch.uint8)
        self._all.append(tensor)
        return tensor

    # -- as a device -----------------------------------------------------------------------------------------

    @contextmanager
    def on(self, stream: Stream) -> Iterator[Stream]:
        """Another stream is current."""
        before, self.now = self.now, stream
        try:
            yield stream
        finally:
            self.now = before

    def after(self, stream: Stream) -> None:
        """The current stream goes on after ``stream``: what user code does between streams of its own."""
        self.now.last |= stream.last

    def allocate(self, slot: Slot) -> torch.Tensor:
        """Definition 2, on the current stream."""
        stream = self.now
        self.allocated.append(stream)
        size = -(-slot.bytes // _GRAIN) * _GRAIN
        free = self._free.setdefault((stream.name, size), [])
        address = free.pop() if free else self._block(size)
        memory = (ctypes.c_char * slot.bytes).from_address(address)
        self.live += size
        weakref.finalize(memory, self._gone, free, address, size)
        flat = torch.frombuffer(memory, dtype=slot.dtype)
        tensor = torch.empty(0, dtype=slot.dtype).set_(flat.untyped_storage(), 0, slot.shape, slot.stride)
        self.write(tensor, 0xEE, "garbage")
        return tensor

    def _block(self, size: int) -> int:
        block = (ctypes.c_char * size)()
        self._all.append(block)
        return ctypes.addressof(block)

    def _gone(self, free: list[int], address: int, size: int) -> None:
        free.append(address)
        self.live -= size

    def write(self, tensor: torch.Tensor, value: int | bytes, what: str = "a kernel") -> None:
        """On the current stream: fill the storage of ``tensor`` with ``value``, or with bytes of it."""
        count, at = _extent(tensor)
        given = value if isinstance(value, bytes) else bytes([value]) * count
        where = (range(at, at + count),)
        self._give(self.now, what, (), where, lambda: ctypes.memmove(at, given, count) and None)

    def read(self, tensor: torch.Tensor, value: int | bytes, what: str = "a kernel") -> None:
        """On the current stream: find what :meth:`write` writes in the storage of ``tensor``, and nothing else."""
        count, at = _extent(tensor)
        expected = value if isinstance(value, bytes) else bytes([value]) * count

        def work() -> None:
            if (found := ctypes.string_at(at, count)) != expected:
                raise Race(f"{what} reads {found[:4].hex()}... where {expected[:4].hex()}... is expected")

        self._give(self.now, what, (range(at, at + count),), (), work)

    def _give(
        self,
        stream: Stream,
        what: str,
        reads: tuple[range, ...],
        writes: tuple[range, ...],
        work: Callable[[], None],
    ) -> None:
        with self._lock:
            number = len(self.operations)
            self.operations.append(Operation(stream, what, stream.last, reads, writes, work))
            stream.last |= 1 << number

    def run(self) -> None:
        """Definitions 1 and 3.

        Raises:
            Race: if there is one.
        """
        if not self.may_wait:
            self._refuse_races()
        with self._lock:
            self._execute((1 << len(self.operations)) - 1)

    def _execute(self, wanted: int) -> None:
        rng = random.Random(self.seed)
        waiting = {n for n in range(len(self.operations)) if wanted >> n & 1 and not self._done >> n & 1}
        while waiting:
            ready = [n for n in sorted(waiting) if not self.operations[n].before & ~self._done]
            number = rng.choice(ready)
            self.operations[number].work()
            self._done |= 1 << number
            waiting.discard(number)

    def _refuse_races(self) -> None:
        for number, one in enumerate(self.operations):
            for index, other in enumerate(self.operations[:number]):
                if one.before >> index & 1:
                    continue
                if _meet(one.writes, other.writes + other.reads) or _meet(one.reads, other.writes):
                    raise Race(
                        f"{one.what} on {one.stream.name} and {other.what} on {other.stream.name} touch the same "
                        "bytes, and neither comes first"
                    )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes and address of its storage."""
    storage = tensor.untyped_storage()
    return storage.nbytes(), storage.data_ptr()


def _meet(some: tuple[range, ...], others: tuple[range, ...]) -> bool:
    return any(a.start < b.stop and b.start < a.stop for a in some for b in others)

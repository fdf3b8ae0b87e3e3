"""The port to a CUDA device: streams, events, and the memory of the host that it can reach by itself.

Nothing else of the transfers calls ``torch.cuda``. What a device does is ordered by its streams and by *edges* alone,
each a wait of a stream for an event of another; :class:`Edge` names all that a move needs.

1. A *side stream* only copies. Device memory is allocated and freed on the streams that compute, never here.
2. The *current* stream is asked for whenever it is needed: a backward, a thread or a block of user code has its own.
"""

from __future__ import annotations

import enum
import threading
from typing import Any, Literal, Protocol

import torch

__all__ = ["CUDA", "CudaStreams", "Edge", "Streams", "bytes_of", "card"]


class Edge(enum.Enum):
    """What has to come before what."""

    MADE = "a buffer has been computed -> it is copied out"
    LEFT = "it has been copied out -> its memory is used again"
    COPIED = "it has been copied out -> it is copied back"
    ROOM = "its memory has been given up by what had it before -> it is copied back"
    BACK = "it has been copied back -> it is read"
    SLOT = "the copies of an earlier step have ended -> their slots are written again"
    DROPPED = "a copy that nobody waited for has ended -> the memory of its buffer is used again"


class Streams(Protocol):
    """What the host tier needs of a device. Streams and events are the device's own, and nothing is known of them."""

    def current(self, device: torch.device) -> Any:
        """The stream on which this thread computes now."""
        ...

    def side(self, device: torch.device, direction: Literal["out", "in"]) -> Any:
        """The stream of copies that way."""
        ...

    def record(self, stream: Any, *, timed: bool = False) -> Any:
        """An event after all that ``stream`` has been given."""
        ...

    def wait(self, stream: Any, event: Any, edge: Edge) -> None:
        """Let all that ``stream`` is given from now on come after ``event``; the host goes on."""
        ...

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Let ``stream`` copy the bytes of ``source``; the host goes on."""
        ...

    def finish(self, event: Any) -> None:
        """Wait until ``event`` has come."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two events that were recorded with ``timed``; waits for the second."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Bytes of the host that the device reaches by itself.

        Raises:
            RuntimeError: if the system gives none.
        """
        ...


class CudaStreams:
    """The port to this machine's cards. Of each there is one side stream per way in a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sides: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def current(self, device: torch.device) -> torch.cuda.Stream:
        """The stream that computes."""
        return torch.cuda.current_stream(device)

    def side(self, device: torch.device, direction: Literal["out", "in"]) -> torch.cuda.Stream:
        """A stream of high priority for copies in one direction.

        Torch hands out those from another set than most programs ask for.
        """
        with self._lock:
            key = (device, direction)
            if key not in self._sides:
                self._sides[key] = torch.cuda.Stream(device, priority=-1)
            return self._sides[key]

    def record(self, stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
        """An event at this point of a stream."""
        event = torch.cuda.Event(enable_timing=timed)
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event, edge: Edge) -> None:
        """Let a stream wait for an event."""
        stream.wait_event(event)

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Issue a copy on a stream. Memory of the host that is not pinned makes the host wait for the copy."""
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def finish(self, event: torch.cuda.Event) -> None:
        """Wait on the host until an event has come."""
        event.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds between two timed events."""
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def pinned(self, size: int) -> torch.Tensor:
        """Pinned memory of the host."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


CUDA = CudaStreams()
"""Of this process."""


def card() -> tuple[torch.device, str, str, int]:
    """The current one: device, name, compute capability, bytes of its memory."""
    index = torch.cuda.current_device()
    facts = torch.cuda.get_device_properties(index)
    return torch.device("cuda", index), facts.name, f"{facts.major}.{facts.minor}", facts.total_memory


def bytes_of(tensor: torch.Tensor, begin: int = 0, size: int | None = None) -> torch.Tensor:
    """Bytes of a tensor's storage in place, as a tensor with a version counter of its own: no view of ``tensor``.

    Args:
        tensor: any.
        begin: the first byte.
        size: how many; all that follow by default.
    """
    storage = tensor.untyped_storage()
    count = storage.nbytes() - begin if size is None else size
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, begin, (count,), (1,))

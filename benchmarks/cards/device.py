"""The little that differs between a card and the CPU that stands in for it: bytes, seconds, the catalogue's machine."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import ebbtide
from ebbtide.step.machine import machine_named
from harness.record import machine_description

__all__ = ["Card", "Device", "Peak", "StandIn", "the_device"]

_CATALOGUE = ("h100-80gb", "h200-141gb", "a100-80gb", "a100-40gb", "rtx4090-24gb", "v100-32gb", "v100-16gb", "t4-16gb")


@dataclass
class Peak:
    """Bytes at the highest point inside a block, everything counted; ``None`` where nobody can tell."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


class Device(Protocol):
    """What a step is measured on."""

    kind: str
    """As torch says it."""
    machine: str
    """The catalogue's machine that predicts it."""
    total_bytes: int
    """Memory of the device."""

    def allocated_bytes(self, *roots: object) -> int:
        """Bytes allocated now, ``roots`` being all that is alive."""
        ...

    def watch(self, *roots: object, first: bool = False) -> contextlib.AbstractContextManager[Peak]:
        """The peak inside the block; ``first`` for a call that captures and measures by itself."""
        ...

    def timed(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of the device, and of the host until it has launched everything, from an idle device on."""
        ...

    def release(self) -> None:
        """Give back what dead objects hold."""
        ...

    def description(self) -> dict[str, Any]:
        """Device and versions; nothing that names the machine."""
        ...


class Card:
    """A CUDA device: its allocator's counters and its events."""

    kind = "cuda"

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.total_bytes = int(properties.total_memory)
        self.machine = _nearest(properties.major, properties.minor, self.total_bytes)

    def allocated_bytes(self, *roots: object) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    @contextlib.contextmanager
    def watch(self, *roots: object, first: bool = False) -> Iterator[Peak]:
        peak = Peak()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # or what others reserved would count as this block's
        torch.cuda.reset_peak_memory_stats()
        yield peak
        torch.cuda.synchronize()
        peak.allocated_bytes, peak.reserved_bytes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def timed(self, run: Callable[[], Any]) -> tuple[float, float]:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        start.record()
        run()
        stop.record()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3, host

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def description(self) -> dict[str, Any]:
        return machine_description() | {
            "card": torch.cuda.get_device_name(),
            "card_gib": round(self.total_bytes / 2**30, 1),
            "cuda": str(torch.version.cuda),
            "cudnn": torch.backends.cudnn.version(),
            "predicted_as": self.machine,
        }


class StandIn:
    """The CPU at toy size: the profiler's bytes, which a first call cannot share, and the process's seconds."""

    kind = "cpu"
    machine = "h100-80gb"
    total_bytes = 64 * 2**20

    def allocated_bytes(self, *roots: object) -> int:
        with ebbtide.measure(*roots) as gauge:
            pass
        return gauge.start_bytes

    @contextlib.contextmanager
    def watch(self, *roots: object, first: bool = False) -> Iterator[Peak]:
        peak = Peak()
        if first:
            yield peak
            return
        with ebbtide.measure(*roots) as gauge:
            yield peak
        peak.allocated_bytes = peak.reserved_bytes = gauge.peak_bytes

    def timed(self, run: Callable[[], Any]) -> tuple[float, float]:
        begin, host = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - begin, time.process_time() - host

    def release(self) -> None:
        gc.collect()

    def description(self) -> dict[str, Any]:
        return machine_description() | {"card": "none: the CPU stands in", "predicted_as": self.machine}


def _nearest(major: int, minor: int, total_bytes: int) -> str:
    """The catalogue's machine of this capability whose memory is nearest."""
    known = [machine_named(name) for name in _CATALOGUE]
    alike = [each for each in known if each.compute_capability == (major, minor)] or known
    return min(alike, key=lambda each: abs(each.memory_bytes - total_bytes)).name


def the_device(toy: bool) -> Device:
    """The card, or the CPU for a run at toy size; kernels give the same bits twice on both."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS wants for that, before its first use
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # that fill is for debugging and costs a kernel each
    if toy:
        torch.set_num_threads(1)
        return StandIn()
    return Card()

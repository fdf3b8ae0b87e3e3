"""The link to the host measured: how fast a CUDA device copies to pinned memory and back, by the device's own clock.

1. A *probe* is :data:`_COPIES` pieces one way, between two events of that way's side stream; then both ways at once.
   The link is duplex if both at once take less than three quarters of what they take in turn.
2. The latency is what a small copy takes besides its bytes, one after the other. What computing loses meanwhile is
   seen by sums on the stream that computes, with and without copies under way: both need the device's memory.
3. Where a card has no room for the probe, its link is that of the catalogue's machine that is most like it; a card of
   a capability that the catalogue lacks is taken to be on PCI Express.
"""

from __future__ import annotations

import statistics
from typing import Literal

import torch

from ebbtide.step.machine import Link, catalogue
from ebbtide.transfers.host import HostTier, Slab
from ebbtide.transfers.slots import Slot
from ebbtide.transfers.streams import Edge, bytes_of

__all__ = ["Rates", "like_of", "measure_host"]

_COPIES = 8
_PIECE_BYTES = 32 * 2**20
_SMALL_BYTES = 64 * 2**10
_ROUNDS = 3
_DUPLEX = 0.75
_PCI_EXPRESS = 63.0e9  # the line rate of generation 5 (``machines.toml``), which no link of the catalogue reaches on it

Rates = tuple[float, float, float, float, bool]
"""Bytes per second out and in, latency in seconds, share of computing that is lost, duplex."""
_Way = Literal["out", "in"]


class _Probe:
    """Times copies between host and card (definitions 1 and 2)."""

    def __init__(self, tier: HostTier, slab: Slab, device: torch.device) -> None:
        self.streams = tier.streams
        self.device = device
        self.host = {"out": self._place(slab, 0), "in": self._place(slab, _PIECE_BYTES)}
        self.card = {way: torch.zeros(_PIECE_BYTES, dtype=torch.uint8, device=device) for way in ("out", "in")}

    def _place(self, slab: Slab, offset: int) -> torch.Tensor:
        return slab.place(Slot(0, "", "host", offset, _PIECE_BYTES, (), (), torch.uint8, self.device))

    def seconds(self, *directions: _Way, copies: int = _COPIES, size: int = _PIECE_BYTES) -> float:
        """What so many copies take each way, all ways at once."""
        streams = self.streams
        start = streams.record(streams.current(self.device))
        sides = [streams.side(self.device, way) for way in directions]
        for side in sides:
            streams.wait(side, start, Edge.MADE)
        begins = [streams.record(side, timed=True) for side in sides]
        for _ in range(copies):
            for way, side in zip(directions, sides, strict=True):
                host, card = bytes_of(self.host[way], 0, size), bytes_of(self.card[way], 0, size)
                streams.copy(*((host, card) if way == "out" else (card, host)), side)
        ends = [streams.record(side, timed=True) for side in sides]
        return max(max(streams.seconds(*pair) for pair in zip(begins, ends, strict=True)), 1e-9)

    def compute_share(self) -> float:
        """How much of a transfer's seconds computing loses (definition 2)."""
        streams = self.streams
        # No product: cuBLAS would keep a workspace for this stream.
        one = torch.zeros(_PIECE_BYTES // 4, device=self.device)
        other = torch.zeros_like(one)

        def compute() -> float:
            now = streams.current(self.device)
            begin = streams.record(now, timed=True)
            for _ in range(8):
                other.add_(one)
            return streams.seconds(begin, streams.record(now, timed=True))

        compute()
        alone: list[float] = []
        beside: list[float] = []
        for _ in range(5):
            alone.append(compute())
            side = streams.side(self.device, "out")
            for _ in range(_COPIES):
                streams.copy(self.host["out"], self.card["out"], side)
            beside.append(compute())
            streams.finish(streams.record(side))
        return min(max(1.0 - statistics.median(alone) / max(statistics.median(beside), 1e-9), 0.0), 0.9)


def measure_host(tier: HostTier, device: torch.device) -> Rates:
    """The link between ``device`` and the host; it is used for some tenths of a second.

    Raises:
        RuntimeError: if the device has no room for the probe.
        TierError: if the host has none.
    """
    slab = tier.region(2 * _PIECE_BYTES)
    try:
        probe = _Probe(tier, slab, device)
        probe.seconds("out", "in", copies=1)
        rounds = [(probe.seconds("out"), probe.seconds("in"), probe.seconds("out", "in")) for _ in range(_ROUNDS)]
        out, back, both = (statistics.median(each) for each in zip(*rounds, strict=True))
        moved = _COPIES * _PIECE_BYTES
        small = statistics.median(probe.seconds("out", copies=32, size=_SMALL_BYTES) / 32 for _ in range(_ROUNDS))
        latency = max(small - _SMALL_BYTES * out / moved, 1e-6)
        return moved / out, moved / back, latency, probe.compute_share(), both < _DUPLEX * (out + back)
    finally:
        tier.give_back(slab)


def like_of(capability: str, memory_bytes: int) -> tuple[str, Link]:
    """Name and link of the catalogue's machine that is most like this card (definition 3)."""
    cards = [(name, each) for name, each in catalogue().items() if "host" in each.links]
    known = [(name, each) for name, each in cards if each.capability == capability] or [
        (name, each) for name, each in cards if each.links["host"].out_bytes_per_second < _PCI_EXPRESS
    ]
    name, found = min(known, key=lambda item: abs(item[1].memory_bytes - memory_bytes))
    return name, found.links["host"]

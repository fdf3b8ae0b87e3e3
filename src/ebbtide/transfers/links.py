"""Links measured: how fast tensors go to a tier and come back, through the very lane or streams that steps use.

1. A *probe* writes :data:`_PROBE_BYTES` in pieces to a region and reads them back, :data:`_ROUNDS` times; the median of
   the rounds is the rate, so that one hiccup of a shared machine does not decide. Small pieces give the latency.
2. ``compute_share`` is by how much a computation of one thread slows down while the lane copies, as a share of the
   lane's seconds: 0 where another core and enough of the memory's bandwidth are free.
3. What was measured is kept in the user's cache directory, by directory and threads, and measured again after a week or
   by ``ebbtide calibrate``. The file is trusted as little as any (``files.read_saved``).
4. Whatever a measurement says, the rates of a transfer are those of the page cache as long as the machine has memory
   for it; a busy disk is slower.
5. The link of a card to the host is measured by the card (``host_link``) and kept by its name; a card that reaches a
   disk does so through the host, one after the other. Plans count on :data:`COUNTED_ON` of its rates: a transfer that
   ends just in time is late as soon as ops are faster than they were alone, by all that they are faster
   (``benchmarks/hybrid.py``, question ``margin``).
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ebbtide.errors import TierError, UsageError
from ebbtide.files import cache_directory, keep, read_record
from ebbtide.step.machine import Link, Machine, is_elsewhere, machine_named
from ebbtide.tiers import Tier
from ebbtide.transfers.disk import DiskTier, Region, free_bytes
from ebbtide.transfers.host import HostTier, free_host_bytes
from ebbtide.transfers.host_link import like_of, measure_host
from ebbtide.transfers.lane import Lane
from ebbtide.transfers.paths import TransferPath
from ebbtide.transfers.staged import StagedDisk
from ebbtide.transfers.streams import card
from ebbtide.transfers.tiers import open_tiers
from ebbtide.units import format_percent

__all__ = [
    "COUNTED_ON",
    "is_measured",
    "machine_with_tiers",
    "measured_host_link",
    "measured_link",
    "this_machine",
    "together_bytes_per_second",
]

COUNTED_ON = 0.8
"""Of a measured link of a card (definition 5)."""
_SCHEMA = "ebbtide-links/1"
_PROBE_BYTES = 64 * 2**20
_PIECE_BYTES = 4 * 2**20
_SMALL_BYTES = 64 * 2**10
_ROUNDS = 3
_VALID_SECONDS = 7 * 24 * 3600.0
_ALIGNMENT_BYTES = 4096
_USABLE = 0.9  # of what is free on the disk
_LEAST_BYTES = 64 * 2**10  # below, what a transfer costs besides its bytes is most of it
_CUDA_BLOCK_BYTES = 512
_HOST: dict[str, Any] = {"alignment_bytes": _CUDA_BLOCK_BYTES, "least_bytes": _LEAST_BYTES}


@dataclass(frozen=True, slots=True)
class _Measured:
    """What was measured of the disk of one directory."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float
    compute_share: float
    duplex: float = 0.0


def machine_with_tiers(
    machine: Machine | None, tiers: Sequence[Tier], device: str
) -> tuple[Machine | None, tuple[str, ...]]:
    """The machine to plan for, with links to ``tiers``, and their names.

    Args:
        machine: of the catalogue; ``None`` or the one named ``cpu`` is the machine at hand.
        tiers: that were asked for.
        device: where the step is to run.

    Raises:
        UsageError: for a tier that the machine does not have.
        TierError: for a disk at hand that cannot be used.
    """
    names = tuple(tier.name for tier in tiers)
    if machine is None or not is_elsewhere(machine):
        return this_machine(open_tiers(tiers, device), device) or machine, names
    if missing := set(names).difference(machine.links):
        has = ", ".join(sorted(machine.links)) or "none"
        raise UsageError(
            f"machine {machine.name!r} has no link to tier {', '.join(sorted(missing))}; it has: {has}",
            argument="tiers",
            value=names,
            accepted=tuple(sorted(machine.links)),
        )
    return machine, names


def this_machine(tiers: Mapping[str, TransferPath], device: str = "cpu") -> Machine | None:
    """The machine at hand with measured links to ``tiers``; ``None`` without any.

    Args:
        tiers: opened, by name.
        device: type of the one that computes; of several cards the current one.

    Raises:
        TierError: if a tier has no room for the probe.
    """
    if not tiers:
        return None
    machine = machine_named("cpu")
    links: dict[str, Link] = {}
    sources = dict(machine.sources)
    for name, tier in tiers.items():
        if isinstance(tier, DiskTier):
            links[name] = measured_link(tier)
            sources["links"] = "measured here, through the page cache"
        elif isinstance(tier, StagedDisk):
            host, source = _counted_on(*measured_host_link(tier.host))
            links[name] = _through(host, measured_link(tier.disk))
            sources[f"links.{name}"] = f"measured here, through the page cache; to the host: {source}"
        elif isinstance(tier, HostTier):
            links[name], sources[f"links.{name}"] = _counted_on(*measured_host_link(tier))
    changed = {"links": links, "sources": sources}
    if device == "cuda":
        changed |= {"device": device, "granularity_bytes": _CUDA_BLOCK_BYTES}
    return Machine(**{**vars(machine), **changed})


def _counted_on(link: Link, source: str) -> tuple[Link, str]:
    """The link that plans are made with, and where it is from (definition 5)."""
    rates = {each: COUNTED_ON * getattr(link, each) for each in ("out_bytes_per_second", "in_bytes_per_second")}
    return replace(link, **rates), f"{source}; plans count on {format_percent(COUNTED_ON)} of its rates"


def _through(host: Link, disk: Link) -> Link:
    """A link to disk through the host, whose seconds add up (definition 5)."""
    return replace(
        disk,
        out_bytes_per_second=1 / (1 / host.out_bytes_per_second + 1 / disk.out_bytes_per_second),
        in_bytes_per_second=1 / (1 / host.in_bytes_per_second + 1 / disk.in_bytes_per_second),
        latency_seconds=host.latency_seconds + disk.latency_seconds,
        compute_share=host.compute_share,  # the disk's is that of computing on the CPU
    )


def measured_host_link(tier: HostTier, *, anew: bool = False) -> tuple[Link, str]:
    """The link of the current card to the host, measured now or within the last week, and where it is from.

    Args:
        tier: to measure it through.
        anew: measure it now in any case.

    Raises:
        TierError: if the host has no room for the probe.
    """
    device, name, capability, memory = card()
    path = _path_named("host", name)
    known, source = None if anew else _read(path), f"measured here, on {name}"
    if known is None:
        try:
            *rates, duplex = measure_host(tier, device)
        except TierError:
            raise
        except RuntimeError:  # the card has no room for the probe
            like, link = like_of(capability, memory)
            return replace(link, **_HOST), f"as of {like}, which is most like this card: it had no room to measure it"
        known = _Measured(*rates, duplex=float(duplex))
        _keep(path, known)
    free = free_host_bytes()
    return (
        Link(
            "host",
            _rounded(_USABLE * free) if free is not None else 2**36,
            known.out_bytes_per_second,
            known.in_bytes_per_second,
            known.latency_seconds,
            duplex=bool(known.duplex),
            compute_share=known.compute_share,
            **_HOST,
        ),
        source,
    )


def measured_link(tier: DiskTier, *, anew: bool = False) -> Link:
    """The link to a directory's disk, measured now or within the last week.

    Args:
        tier: of the directory.
        anew: measure it now in any case.

    Raises:
        TierError: if the disk has no room for the probe.
    """
    path = _path_of(tier.directory)
    known = None if anew else _read(path)
    if known is None:
        known = _measure(tier)
        _keep(path, known)
    return Link(
        "disk",
        _rounded(_USABLE * free_bytes(tier.directory)),
        known.out_bytes_per_second,
        known.in_bytes_per_second,
        known.latency_seconds,
        duplex=False,
        compute_share=known.compute_share,
        alignment_bytes=_ALIGNMENT_BYTES,
        least_bytes=_LEAST_BYTES,
    )


def together_bytes_per_second(tier: DiskTier) -> float:
    """Bytes per second of both ways at once, on two lanes: what the disk could do, though steps use one lane.

    Raises:
        TierError: if the disk has no room for the probe.
    """
    out, back = tier.region(_PROBE_BYTES), tier.region(_PROBE_BYTES)
    try:
        one, two = (torch.zeros(_PIECE_BYTES, dtype=torch.uint8) for _ in range(2))
        lanes = Lane("probe out"), Lane("probe in")
        begin = time.perf_counter()
        jobs = [
            lane.submit(lambda at=at, move=move, piece=piece: move(at, piece))
            for at in range(0, _PROBE_BYTES, _PIECE_BYTES)
            for lane, move, piece in zip(lanes, (out.write, back.read), (one, two), strict=True)
        ]
        for job in jobs:
            job.wait()
            if job.failure:
                raise out.failure("measuring the link", job.failure)
        return 2 * _PROBE_BYTES / max(time.perf_counter() - begin, 1e-9)
    finally:
        tier.give_back(out)
        tier.give_back(back)


def _rounded(size: float) -> int:
    """A power of two: plans are kept by all that they depend on, and what is free changes all the time."""
    return 1 << max(int(size).bit_length() - 1, 0)


def is_measured(directory: Path) -> bool:
    """Whether the link to ``directory`` has been measured lately."""
    return _read(_path_of(directory)) is not None


def _path_of(directory: Path) -> Path:
    return _path_named("disk", f"{directory} {torch.get_num_threads()}")


def _path_named(tier: str, named: str) -> Path:
    return cache_directory() / "links" / f"{tier}-{hashlib.sha256(named.encode()).hexdigest()[:16]}.json"


def _keep(path: Path, links: _Measured) -> None:
    data = {"schema": _SCHEMA, "when": time.time(), "link": asdict(links)}
    keep(path, path.with_name(".lock"), lambda: data)


def _read(path: Path) -> _Measured | None:
    found = read_record(path, _SCHEMA, _lately_measured)
    if found is None:
        return None
    rates = (found.out_bytes_per_second, found.in_bytes_per_second)
    sound = all(1.0 <= rate <= 1e15 for rate in rates) and 0 <= found.latency_seconds <= 10
    return found if sound and 0 <= found.compute_share < 1 else None


def _lately_measured(data: dict[str, Any]) -> _Measured | None:
    recent = 0 <= time.time() - data["when"] <= _VALID_SECONDS
    return _Measured(**{name: float(value) for name, value in data["link"].items()}) if recent else None


def _measure(tier: DiskTier) -> _Measured:
    """Measure a disk's rates and what computing loses beside it (definitions 1 and 2)."""
    region = tier.region(_PROBE_BYTES)
    try:
        piece = torch.zeros(_PIECE_BYTES, dtype=torch.uint8)
        small = torch.zeros(_SMALL_BYTES, dtype=torch.uint8)
        rounds: list[tuple[float, float]] = []
        for _ in range(_ROUNDS):
            rounds.append((_pass(tier, region, piece, "write"), _pass(tier, region, piece, "read")))
        out, back = (statistics.median(each) for each in zip(*rounds, strict=True))
        count = 32
        begin = time.perf_counter()
        for index in range(count):
            tier.lane.submit(lambda at=index * _SMALL_BYTES: region.write(at, small)).wait()
        latency = max((time.perf_counter() - begin) / count - _SMALL_BYTES * out / _PROBE_BYTES, 1e-6)
        share = _compute_share(tier, region, piece)
    finally:
        tier.give_back(region)
    return _Measured(_PROBE_BYTES / out, _PROBE_BYTES / back, latency, share)


def _pass(tier: DiskTier, region: Region, piece: torch.Tensor, direction: str) -> float:
    """Seconds, on the lane's clock, to move the probe one way."""
    move = region.write if direction == "write" else region.read
    jobs = [tier.lane.submit(lambda at=at: move(at, piece)) for at in range(0, _PROBE_BYTES, _PIECE_BYTES)]
    for job in jobs:
        job.wait()
        if job.failure:
            raise region.failure("measuring the link", job.failure)
    return max(sum(job.seconds for job in jobs), 1e-9)


def _compute_share(tier: DiskTier, region: Region, piece: torch.Tensor) -> float:
    """How much a thread that computes loses to transfers (definition 2).

    From the best of rounds in turn with and without a transfer under way: other jobs slow both.
    """
    matrix = torch.zeros(192, 192)

    def compute() -> float:
        begin = time.perf_counter()
        for _ in range(20):
            torch.mm(matrix, matrix)
        return time.perf_counter() - begin

    compute()
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(9):
        alone.append(compute())
        jobs = [tier.lane.submit(lambda at=at: region.write(at, piece)) for at in range(0, _PROBE_BYTES, _PIECE_BYTES)]
        beside.append(compute())
        for job in jobs:
            job.cancel()
        for job in jobs:
            job.wait()
    return min(max(1.0 - min(alone) / max(min(beside), 1e-9), 0.0), 0.9)

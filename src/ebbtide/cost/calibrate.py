"""What the machine at hand can do, measured: arithmetic, memory, the least time of an op, and its links.

Definitions:
1. A *rate* is the best of :data:`_ROUNDS` rounds: other jobs can only make a round slower. Arithmetic is that of a
   product of two square matrices, memory the traffic of an addition of two vectors far larger than any cache (two reads
   and a write), the least time that of an addition of two scalars. It is *disturbed* where the second best round is
   longer by :data:`_APART`, or where the best has waited for a core: then links are not measured, and nothing is kept.
2. A link is measured through the lane that steps use (``transfers.links``): each way alone and against computing. Both
   ways at once are measured with two lanes, to tell what the disk itself could do; a step uses one.
3. The machine that comes out replaces the catalogue's ``cpu`` wherever a cost has to be estimated, until it is measured
   again (``step.machine.machine_named``). Costs that are measured op by op do not depend on it.
4. The host's memory is slower memory of a card alone: that link is the current card's, and no part of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ebbtide.step.machine import Link, Machine, catalogue, keep_machine
from ebbtide.tiers import Tier
from ebbtide.transfers.disk import DiskTier
from ebbtide.transfers.host import HostTier
from ebbtide.transfers.links import measured_host_link, measured_link, together_bytes_per_second
from ebbtide.transfers.tiers import open_tiers

__all__ = ["Calibration", "calibrate"]

_ROUNDS = 7
_APART, _LEAST_USED = 0.25, 0.9
_MOST_SECONDS = 2.0  # for all rounds: some dtypes have no kernel that is worth the name
_SIZE = 768  # of the matrices
_VECTOR_BYTES = 64 * 2**20
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        machine: with its rates, and links to the disks that were asked for.
        together_bytes_per_second: per disk, both ways at once.
        path: of the machine file; empty if it could not be written.
        card_link: the current card's to the host, if it was asked for, at the rates that were measured.
        card_source: where that is from, in words.
        disturbed: what others' work has changed, in words; nothing is kept then.
    """

    machine: Machine
    together_bytes_per_second: dict[str, float]
    path: str
    card_link: Link | None = None
    card_source: str = ""
    disturbed: tuple[str, ...] = ()


def calibrate(tiers: Sequence[Tier], tell: Callable[[str], None] = lambda _: None) -> Calibration:
    """Measure the CPU at hand, its links to disks and a card's to the host, and keep the result for later plans.

    Args:
        tiers: disks, and the host's memory where there is a card.
        tell: called with what is being measured.

    Raises:
        UsageError: for the host's memory where there is no card: it is a CPU's own.
        TierError: for a disk that cannot be used, or a tier that has no room.
    """
    of_card = [tier for tier in tiers if tier.directory is None and torch.cuda.is_available()]
    opened = open_tiers([tier for tier in tiers if tier not in of_card], "cpu")
    hosts = open_tiers(of_card, "cuda")
    found: dict[str, _Best] = {}

    def measured(what: str, work: Callable[[], object], repeat: int = 1) -> float:
        tell(what)
        found[what] = _best(work, repeat)
        return found[what].seconds

    flops: dict[str, float] = {}
    for dtype in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        flops[name] = 2.0 * _SIZE**3 / measured(f"arithmetic in {name}", _product(dtype))
    bandwidth = 3.0 * _VECTOR_BYTES / measured("memory", _addition())
    launch = measured("the least time of an op", _scalar_addition(), 1000)
    disturbed = tuple(what for what, best in found.items() if best.disturbed)
    links: dict[str, Link] = {}
    together: dict[str, float] = {}
    for name, tier in opened.items() if not disturbed else ():
        assert isinstance(tier, DiskTier)
        tell(f"the link to {tier.directory}")
        links[name] = measured_link(tier, anew=True)
        together[name] = together_bytes_per_second(tier)
    card_link, card_source = None, ""
    for tier in hosts.values() if not disturbed else ():
        assert isinstance(tier, HostTier)
        tell("the card's link to the host")
        card_link, card_source = measured_host_link(tier, anew=True)
    threads = torch.get_num_threads()
    source = f"ebbtide calibrate, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"
    default = catalogue()["cpu"]
    rates = ("flops", "bytes_per_second", "launch_seconds")
    machine = replace(
        default,
        flops=flops,
        bytes_per_second=bandwidth,
        launch_seconds=launch,
        sources={**default.sources, **dict.fromkeys(rates, source)},
    )
    path = None if disturbed else keep_machine(machine)
    kept = "" if path is None else str(path)
    return Calibration(replace(machine, links=links), together, kept, card_link, card_source, disturbed)


@dataclass(frozen=True)
class _Best:
    """Seconds of the best round, and whether it is disturbed (definition 1)."""

    seconds: float
    disturbed: bool


def _best(work: Callable[[], object], repeat: int) -> _Best:
    """Seconds of one ``work``."""
    work()
    rounds: list[tuple[float, float]] = []
    first = time.perf_counter()
    for _ in range(_ROUNDS):
        begin, used = time.perf_counter(), time.process_time()
        if begin - first > _MOST_SECONDS:
            break
        for _ in range(repeat):
            work()
        rounds.append((time.perf_counter() - begin, time.process_time() - used))
    rounds.sort()
    (best, used), others = rounds[0], rounds[1:]
    apart = bool(others) and others[0][0] > (1 + _APART) * best
    return _Best(max(best / repeat, 1e-9), apart or used < _LEAST_USED * best)


def _product(dtype: torch.dtype) -> Callable[[], object]:
    one, two = torch.ones(_SIZE, _SIZE, dtype=dtype), torch.ones(_SIZE, _SIZE, dtype=dtype)
    out = torch.empty_like(one)
    return lambda: torch.mm(one, two, out=out)


def _addition() -> Callable[[], object]:
    one, two = (torch.ones(_VECTOR_BYTES // 4) for _ in range(2))
    out = torch.empty_like(one)
    return lambda: torch.add(one, two, out=out)


def _scalar_addition() -> Callable[[], object]:
    one, out = torch.ones(()), torch.empty(())
    return lambda: torch.add(one, one, out=out)

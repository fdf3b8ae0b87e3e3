"""Swapping out what lies far from the loss (Meng, Sun, Yang, Qiu, Gu, ML Systems Workshop at NIPS 2017, paper 18).

Definitions (*feature maps* and *begins* are those of ``published.moving``):
1. *Which*: a threshold says how many bytes of feature maps stay on the device. It is spent in reverse topological
   order, so that what is made near the loss stays, up to the first feature map that it has no room for: all those
   before it are swapped out.
2. *When*: a swapped feature map leaves after its last read in the forward and comes back once, for the first op of the
   backward that reads it. A trigger op gates the way back: by the static estimates (``published.moving``, definition 2)
   the last one whose end leaves time for the transfer, so that it is as late as may be without blocking. Transfers that
   share a link are not reckoned with, as published. Where the budget has no room for it yet it waits for that, as for
   an allocator.
3. The published system is given its threshold. Without one, the largest is searched whose plan fits the budget by the
   simulator: this search is ours. It counts the feature maps that are swapped (``published.moving``, definition 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.planners.base import Answer, Problem, Status
from ebbtide.planners.hybrid.choice import Choice
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner
from ebbtide.planners.settings import setting
from ebbtide.units import format_bytes
from ebbtide_published.planners.measured import Measured, measured
from ebbtide_published.planners.moving import (
    NO_TIER,
    Tiers,
    answer_of,
    backward_reads,
    begins,
    count_that_fits,
    feature_maps,
    last_forward_read,
    latest_load,
    moved_bytes,
    unmoved,
)

__all__ = ["SwapSettings", "swap"]


@dataclass(frozen=True, kw_only=True)
class SwapSettings:
    """What may follow the name."""

    threshold_bytes: int | None = setting(None, bytes=True)
    """Of feature maps, that stay on the device (definition 1); searched where it is left out (definition 3)."""


@planner("swap", moves=True, needs_tiers=True, settings=SwapSettings)
def swap(problem: Problem) -> Answer:
    """The plan of a threshold; without one, of the largest for which it fits."""
    settings: SwapSettings = problem.settings or SwapSettings()
    program = problem.program
    maps = feature_maps(program, problem.links)
    threshold = settings.threshold_bytes
    if threshold is None and (unplanned := keep_all(problem)).status is Status.OPTIMAL:
        return unplanned
    if not maps:
        return unmoved(problem, "no feature map may leave" if problem.links else NO_TIER)
    if threshold is None:
        return _searched(problem, maps)
    count = _swapped(problem, maps, threshold)
    if not count:
        total = format_bytes(moved_bytes(program, maps))
        return unmoved(problem, f"the threshold has room for all {len(maps)} feature maps of {total}")
    return answer_of(problem, _measured(problem, maps[:count]), _notes(problem, maps, count))


def _swapped(problem: Problem, maps: list[int], threshold: int) -> int:
    """How many feature maps a threshold swaps, the first ones (definition 1)."""
    for count in range(len(maps), 0, -1):
        threshold -= problem.program.buffers[maps[count - 1]].bytes
        if threshold < 0:
            return count
    return 0


def _measured(problem: Problem, swapped: list[int]) -> Measured:
    """The plan that swaps these (definition 2)."""
    program, begin = problem.program, begins(problem.program)
    tiers = Tiers(program, problem.links)
    loads: set[tuple[int, int]] = set()
    for b in swapped:
        if tiers.take(b):
            first, use = last_forward_read(program, b) + 1, backward_reads(program, b)[0]
            loads.add((b, latest_load(program, begin, first, use, tiers.in_seconds(b))))
    return measured(problem, Choice(loads=frozenset(loads), tiers=tiers.of), late_loads=True)


def _searched(problem: Problem, maps: list[int]) -> Answer:
    """The best number of swapped maps (definition 3)."""
    count, found = count_that_fits(problem, len(maps), lambda each: _measured(problem, maps[:each]), "feature maps")
    return answer_of(problem, found, _notes(problem, maps, count))


def _notes(problem: Problem, maps: list[int], count: int) -> dict[str, str]:
    stays = moved_bytes(problem.program, maps[count:])
    return {"threshold_bytes": str(stays), "chosen": f"{count} of {len(maps)} feature maps, the first ones"}

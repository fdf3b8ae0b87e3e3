"""The largest batch of several, found with few questions; and what it takes to say that one fits.

A batch is *judged* by a plan within the budget and the limit on the overhead. Planning ends as soon as one is found or
a bound proves that there is none (:func:`judged`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ebbtide._api.estimate import AheadStep
from ebbtide.errors import BudgetError
from ebbtide.planners import Interrupt, Progress
from ebbtide.planners.registry import finds_smallest
from ebbtide.planning.pipeline import PlanningOptions
from ebbtide.report.plan import Plan
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule
from ebbtide.units import Budget

__all__ = ["judged", "largest", "one_forward"]

MOST = 1 << 20
SURE = 1e-4  # of overhead: how far from the limit a plan or a bound is that needs no second look


def one_forward(program: Program) -> float:
    """The overhead of running the whole forward once more (Checkmate §6.4, equation 10)."""
    forward = sum(op.seconds for op in program.ops[: program.boundary])
    return forward / program.seconds if program.seconds else 0.0


def largest(fits: Callable[[int], bool], guess: int = 1, coarse: int = 1) -> int:
    """The largest batch that ``fits``, looked for from ``guess`` in growing steps, then between; 0 if none does.

    Args:
        fits: whether a batch does; one that is smaller than one that does fits too.
        guess: 1 or more; asked first.
        coarse: how far the answer may be below the largest, plus 1; also the first step.
    """
    low = high = guess
    step = coarse
    if fits(guess):
        while low + step <= MOST and fits(low + step):
            low, step = low + step, 2 * step
        high = low + step
    else:
        while (low := max(high - step, 0)) and not fits(low):
            high, step = low, 2 * step
    while high - low > (coarse if low else 1):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def judged(
    step: AheadStep,
    budget: Budget,
    limit: float | None,
    options: PlanningOptions,
    seeds: Sequence[Schedule] = (),
) -> Plan | None:
    """A plan of ``step`` within ``budget`` and ``limit``, not the best; ``None`` if there is none.

    Args:
        step: captured.
        budget: in bytes.
        limit: on the overhead; ``None`` for none.
        options: how to plan.
        seeds: schedules to start from.
    """
    known = (options.interrupt or Interrupt()).or_after(math.inf)
    bound_holds = options.planner == "auto" and not step.tiers  # others may leave the class of a bound that they tell

    def tell(progress: Progress) -> None:
        best, bound = progress.best_overhead, progress.bound
        fits = best is not None and (limit is None or best <= limit - SURE)
        too_slow = bound_holds and limit is not None and bound is not None and bound > limit + SURE
        asked_in_vain = best is None and progress.smallest_bytes is not None and finds_smallest(options.planner)
        # What is known of the captured program says nothing of its alternatives.
        if fits or ((too_slow or asked_in_vain) and next(iter(step.alternatives or ()), None) is None):
            known.set()

    try:
        plan = step.plan(budget, replace(options, interrupt=known, progress=tell), seeds)
    except BudgetError:
        return None
    return plan if limit is None or plan.overhead <= limit else None

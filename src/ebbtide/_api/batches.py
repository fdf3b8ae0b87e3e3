"""The largest batch of several: found with few questions, each of which costs a plan or a capture.

1. Sizes of a step are affine in its batch where its ops are the same at every batch, and its seconds nearly so: two
   captures give the steps between, the better the nearer they are (``interpolated``).
   So are the programs of their alternatives, of which the coarsest slices of a form are taken.
2. A batch is *judged* by a plan within the budget and the limit on the overhead. Planning ends as soon as one is found
   or a bound proves that there is none (``judged``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from ebbtide._api.estimate import AheadStep
from ebbtide.errors import BudgetError
from ebbtide.planners import Interrupt, Progress
from ebbtide.planners.registry import finds_smallest
from ebbtide.planning.alternatives import Alternative, Alternatives, Costed
from ebbtide.planning.pipeline import PlanningOptions
from ebbtide.report.plan import Plan
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule
from ebbtide.units import Budget

__all__ = ["interpolated", "judged", "largest", "one_forward"]

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


def interpolated(
    small: AheadStep, large: AheadStep, batches: tuple[int, int] = (2, 4)
) -> Callable[[int], AheadStep] | None:
    """The step at any batch from those at two ``batches``; ``None`` if their ops differ."""
    (low, high) = batches
    program_at = _programs(small.program, large.program, batches)
    if program_at is None:
        return None
    others = _alternatives(small.alternatives or (), large.alternatives or (), batches)
    first = {_kinds(each) for each in (small.alternatives.first if small.alternatives else ())}

    def at(batch: int) -> AheadStep:
        resident = round(_between(small.resident_bytes, large.resident_bytes, (batch - low) / (high - low)))
        found = [
            replace(each, make=partial(_itself, made), costed=partial(Costed, each.rewrites, made), refined=tuple)
            for each, other_at in others
            for made in (other_at(batch),)
        ]
        alternatives = Alternatives(
            lambda: (each for each in found if _kinds(each) in first),
            lambda: (each for each in found if _kinds(each) not in first),
        )
        return replace(
            small, program=program_at(batch), resident_bytes=resident, resident={}, alternatives=alternatives
        )

    return at


def _itself(program: Program) -> Program:
    return program


def _between(a: float, b: float, share: float) -> float:
    return max(a + (b - a) * share, 0)


def _programs(one: Program, other: Program, batches: tuple[int, int]) -> Callable[[int], Program] | None:
    """The program at any batch from those at two; ``None`` if their ops differ."""
    low, high = batches
    same = len(one.ops) == len(other.ops) and len(one.buffers) == len(other.buffers)
    same = same and (one.boundary, one.forward_outputs, one.gradients) == (
        other.boundary,
        other.forward_outputs,
        other.gradients,
    )
    if not same or any(
        (a.target, a.inputs, a.outputs) != (b.target, b.inputs, b.outputs)
        for a, b in zip(one.ops, other.ops, strict=True)
    ):
        return None

    def at(batch: int) -> Program:
        share = (batch - low) / (high - low)
        buffers = tuple(
            replace(a, bytes=round(_between(a.bytes, b.bytes, share)))
            for a, b in zip(one.buffers, other.buffers, strict=True)
        )
        ops = tuple(
            replace(
                a,
                seconds=_between(a.seconds, b.seconds, share),
                workspace_bytes=round(_between(a.workspace_bytes, b.workspace_bytes, share)),
            )
            for a, b in zip(one.ops, other.ops, strict=True)
        )
        return replace(one, ops=ops, buffers=buffers)

    return at


def _alternatives(
    small: Iterable[Alternative], large: Iterable[Alternative], batches: tuple[int, int]
) -> list[tuple[Alternative, Callable[[int], Program]]]:
    """Those of both batches that rewrite alike, and their programs at any batch, with estimated costs."""
    found: list[tuple[Alternative, Callable[[int], Program]]] = []
    alike = {_kinds(each): each for each in reversed([*large])}
    for each in {_kinds(each): each for each in reversed([*small])}.values():
        other = alike.get(_kinds(each))
        at = None if other is None else _programs(each.estimated, other.estimated, batches)
        if at is not None:
            found.append((each, at))
    return found


def _kinds(alternative: Alternative) -> tuple[object, ...]:
    """What is the same of an alternative at another batch: where and how it rewrites, not the sizes of its slices."""
    return tuple((each.at, each.rule, each.form, dict(each.settings).get("percent")) for each in alternative.rewrites)


def judged(
    step: AheadStep,
    budget: Budget,
    limit: float | None,
    options: PlanningOptions,
    seeds: Sequence[Schedule] = (),
) -> Plan | None:
    """A plan of ``step`` within ``budget`` and ``limit``, not the best; ``None`` if there is none (definition 2).

    Args:
        step: captured, or between two that are.
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

"""Plans of one program over budgets and planners: the memory/time frontier, and planners side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ebbtide.errors import BudgetError
from ebbtide.planners import Interrupt, Progress
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning.one_program import smallest_told
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.planning.step_end import NOTHING_AFTER, StepEnd
from ebbtide.report.plan import Plan
from ebbtide.step.program import Program
from ebbtide.step.refusal import Refusal
from ebbtide.step.schedule import Schedule
from ebbtide.units import Budget, format_allowed

__all__ = ["frontier"]


def _told_as(what: str, progress: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """``progress``, told which of many plans it is about."""
    return lambda each: progress(replace(each, stage=f"{what}: {each.stage}"))


def frontier(
    program: Program,
    budgets: Sequence[Budget],
    planners: Sequence[str],
    *,
    resident_bytes: int,
    reserve_bytes: int,
    end: StepEnd = NOTHING_AFTER,
    options: PlanningOptions,
) -> Iterator[Plan | Refusal]:
    """A plan or a refusal per budget and planner, ascending by budget.

    Each planner also starts from its own plan at the next smaller budget, so that one that uses seeds is monotone.

    Args:
        program: with costs.
        budgets: of the peak, resident part included.
        planners: names; any but ``auto`` is left to itself otherwise.
        resident_bytes: as for :func:`~ebbtide.planning.pipeline.make_plan`.
        reserve_bytes: as there.
        end: as there.
        options: how to plan; its planner is not looked at.
    """
    within_bytes = sorted({end.budget_bytes(each, program, resident_bytes, reserve_bytes) for each in budgets})
    machine = options.machine
    links = {} if machine is None else {tier: machine.links[tier] for tier in options.tiers if tier in machine.links}
    # Every plan asks for the smallest; found here, no planner's seconds have it in them.
    tell = smallest_told(options.progress, None, lambda above: resident_bytes + reserve_bytes + above)
    never = Interrupt() if options.interrupt is None else options.interrupt.without_limit()
    smallest_of(program, interrupt=never, tell=tell)
    if links:
        smallest_of(program, interrupt=never, links=links, tell=tell)
    seeds: dict[str, Schedule] = {}
    made_so_far: list[Plan] = []
    for budget_bytes in within_bytes:
        for planner in planners:
            begin = time.perf_counter()
            within = f"{planner} within {format_allowed(budget_bytes)}"
            own = [seeds[planner]] if planner in seeds else []
            known = [each for each in made_so_far if each.planner == planner]
            here = partial(
                make_plan,
                budget=Budget(bytes=budget_bytes),
                resident_bytes=resident_bytes,
                reserve_bytes=reserve_bytes,
                end=end,
            )
            how = replace(options, planner=planner, progress=_told_as(within, options.progress), other_plans=known)
            try:
                made = _no_worse(here(program, seeds=own, options=how), known, here, how)
            except BudgetError as error:
                yield Refusal(planner, budget_bytes, error, time.perf_counter() - begin)
                continue
            made_so_far.append(made)
            if made.rewritten is None:
                seeds[planner] = made.schedule
            yield made


def _no_worse(plan: Plan, other_plans: Sequence[Plan], here: Callable[..., Plan], how: PlanningOptions) -> Plan:
    """``plan``, or a plan of what a smaller budget's plan has rewritten: this one may not have had to look at that."""
    others = [each for each in other_plans if each.rewritten is not None]
    less = min(others, key=lambda each: each.step_seconds, default=plan)
    if less.step_seconds >= plan.step_seconds:
        return plan
    as_there = replace(how, rewritten=less.rewritten, alternatives=None, other_plans=(less,))
    again = here(less.program, options=as_there)
    return replace(again, smallest_bytes=min(again.smallest_bytes, plan.smallest_bytes))

"""Plans of one program over budgets and planners: the memory/time frontier, and planners side by side."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ebbtide.errors import BudgetError
from ebbtide.planners import Interrupt, Progress, Status
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning.pipeline import PlanningOptions, make_plan, smallest_told
from ebbtide.planning.step_end import NOTHING_AFTER, StepEnd
from ebbtide.step.plan import Plan
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule
from ebbtide.units import Budget, format_allowed, format_bytes

__all__ = ["Frontier", "Refusal", "frontier"]


def _told_as(what: str, progress: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """``progress``, told which of many plans it is about."""
    return lambda each: progress(replace(each, stage=f"{what}: {each.stage}"))


@dataclass(frozen=True)
class Refusal:
    """A planner that has no plan within a budget.

    Attributes:
        planner: its name.
        budget_bytes: of the peak, resident part included.
        error: what it would have raised, with the smallest workable budget.
        plan_seconds: what that took.
        status: ``INFEASIBLE``; for a planner other than ``auto`` this means that it found none.
    """

    planner: str
    budget_bytes: int
    error: BudgetError
    plan_seconds: float
    status: Status = Status.INFEASIBLE


class Frontier(list[Plan]):
    """Plans over budgets, ascending, and what has none; printed, it is a table of both.

    Attributes:
        refusals: budgets and planners without a plan, each with the reason and the least budget for which there is one.
    """

    def __init__(self, outcomes: Iterable[Plan | Refusal] = ()) -> None:
        made = list(outcomes)
        super().__init__(each for each in made if isinstance(each, Plan))
        self.refusals = tuple(each for each in made if isinstance(each, Refusal))

    def __str__(self) -> str:
        """The table."""
        from ebbtide.report.text.compare import row_of, write_rows

        stream = io.StringIO()
        name = next((each.case for each in self), "")
        write_rows([row_of(name, each) for each in (*self, *self.refusals)], stream)
        return stream.getvalue()

    def left_out(self) -> str:
        """What has no plan and why, in a sentence; empty if all have one."""
        budgets: dict[int, list[Refusal]] = {}
        for each in self.refusals:
            budgets.setdefault(each.budget_bytes, []).append(each)
        parts: list[str] = []
        for budget, refused in sorted(budgets.items()):
            least = min(each.error.smallest_bytes for each in refused)
            what = f"{', '.join(each.planner for each in refused)} within {format_allowed(budget)} ({budget} bytes)"
            too_small = f"the smallest for which a plan was found is {format_bytes(least)} ({least} bytes)"
            parts.append(f"{what}: {too_small if budget < least else 'another planner has one'}")
        return "; ".join(parts)


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
            how = replace(options, planner=planner, progress=_told_as(within, options.progress), known=known)
            try:
                made = _no_worse(here(program, seeds=own, options=how), known, here, how)
            except BudgetError as error:
                yield Refusal(planner, budget_bytes, error, time.perf_counter() - begin)
                continue
            made_so_far.append(made)
            if made.rewritten is None:
                seeds[planner] = made.schedule
            yield made


def _no_worse(made: Plan, known: Sequence[Plan], here: Callable[..., Plan], how: PlanningOptions) -> Plan:
    """``made``, or a plan of what a smaller budget's plan has rewritten: this one may not have had to look at that."""
    others = [each for each in known if each.rewritten is not None]
    less = min(others, key=lambda each: each.step_seconds, default=made)
    if less.step_seconds >= made.step_seconds:
        return made
    as_there = replace(how, rewritten=less.rewritten, alternatives=(), known=())
    again = here(less.program, seeds=[less.schedule], options=as_there)
    return replace(again, smallest_bytes=min(again.smallest_bytes, made.smallest_bytes))

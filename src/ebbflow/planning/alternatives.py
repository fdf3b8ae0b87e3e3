"""Other programs for the same step, with the same bits: which of them is planned.

1. The captured program is planned first. If it fits without added time, that is the plan.
2. The others are ranked by what a quick plan of their estimated costs takes. One that takes more unplanned than the
   best plan so far cannot win, and one whose floor is above the budget cannot fit.
3. The best of them get their costs measured, and what they take for granted, and are planned in earnest. The plan of
   least predicted time wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ebbflow.errors import BudgetError
from ebbflow.planners.base import Problem, planner_named
from ebbflow.planners.bounds.floor import floor_bytes
from ebbflow.step.plan import Plan
from ebbflow.step.program import Program
from ebbflow.step.rewrite import Rewrite, Rewritten
from ebbflow.step.simulate import simulate
from ebbflow.step.unplanned import unplanned_bytes

__all__ = ["Alternative", "best_of"]

_ENOUGH = 1e-3
"""Overhead of a plan of the captured program that leaves nothing to win."""
_MOST_TRIED = 3
"""Alternatives that are planned in earnest and fit."""
_MOST_REFUSED = 2
"""Alternatives of the least floors that are asked for the smallest budget, where none fits."""


@dataclass(frozen=True)
class Alternative:
    """One of them.

    Attributes:
        rewrites: from the captured program to it.
        estimated: it, with estimated costs.
        costed: gives it with costs as good as the captured program's; ``None`` where something that it takes for
            granted does not hold, or nobody knows.
    """

    rewrites: tuple[Rewrite, ...]
    estimated: Program
    costed: Callable[[], Program | None] = field(repr=False)


def best_of(
    program: Program,
    alternatives: Sequence[Alternative],
    above_budget_bytes: int,
    plan_one: Callable[[Program, Rewritten | None], Plan],
) -> Plan:
    """The best plan of any of the programs.

    Args:
        program: as captured, with costs.
        alternatives: of it.
        above_budget_bytes: what a plan may take above the step's start.
        plan_one: plans one program; raises ``BudgetError``.

    Raises:
        BudgetError: if none fits; it tells the least budget of all of them.
    """
    refusals: list[BudgetError] = []

    def attempt(candidate: Program, rewritten: Rewritten | None) -> Plan | None:
        try:
            return plan_one(candidate, rewritten)
        except BudgetError as error:
            refusals.append(error)
            return None

    best = attempt(program, None)
    if best is not None and best.overhead <= _ENOUGH:
        return best
    captured = (program.seconds, unplanned_bytes(program))
    tried = 0
    for each in _ranked(program, alternatives, above_budget_bytes):
        if best is not None and each.estimated.seconds >= best.step_seconds:
            continue
        if (costed := each.costed()) is None:
            continue
        plan = attempt(_surrounded(costed, program), Rewritten(each.rewrites, *captured))
        if plan is None:
            continue
        tried += 1
        if best is None or plan.step_seconds < best.step_seconds:
            best = replace(plan, smallest_bytes=min(plan.smallest_bytes, best.smallest_bytes if best else 2**62))
        if tried == _MOST_TRIED:
            break
    best = best or _the_smallest(program, alternatives, captured, attempt)
    if best is not None:
        return best
    raise min(refusals, key=lambda each: each.smallest_bytes or 0)


def _the_smallest(
    program: Program,
    alternatives: Sequence[Alternative],
    captured: tuple[float, int],
    attempt: Callable[[Program, Rewritten | None], Plan | None],
) -> Plan | None:
    """A plan of one of the least floors after all, for these are estimates; or let them say what they would need."""
    asked = 0
    for each in sorted(alternatives, key=lambda each: floor_bytes(each.estimated)[0]):
        if asked == _MOST_REFUSED:
            break
        if (costed := each.costed()) is not None:
            plan = attempt(_surrounded(costed, program), Rewritten(each.rewrites, *captured))
            if plan is not None:
                return plan
            asked += 1
    return None


def _surrounded(candidate: Program, program: Program) -> Program:
    """``candidate`` with what user code takes around the graphs of ``program``."""
    return replace(candidate, between_bytes=program.between_bytes, held_bytes=program.held_bytes)


def _ranked(program: Program, alternatives: Sequence[Alternative], above_budget_bytes: int) -> list[Alternative]:
    """Definition 2, the best first."""
    greedy = planner_named("greedy")
    ranked: list[tuple[float, int, Alternative]] = []
    best = float("inf")
    candidates = [(each.estimated.seconds, floor_bytes(each.estimated)[0], i) for i, each in enumerate(alternatives)]
    for position, (unplanned, floor, index) in enumerate(sorted(candidates)):
        each = alternatives[index]
        candidate = _surrounded(each.estimated, program)
        if unplanned >= best and len(ranked) >= _MOST_TRIED:
            break
        if floor > above_budget_bytes:
            continue
        answer = greedy(Problem(program=candidate, above_budget_bytes=above_budget_bytes, effort=1, seed=0))
        if answer.schedule is None:
            ranked.append((float("inf"), position, each))
            continue
        seconds = simulate(candidate, answer.schedule).seconds
        best = min(best, seconds)
        ranked.append((seconds, position, each))
    return [each for _, _, each in sorted(ranked, key=lambda entry: entry[:2])]

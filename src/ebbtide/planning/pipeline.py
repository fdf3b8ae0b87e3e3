"""From a program and a budget to a plan: one way for ``plan``, ``fit``, ``sweep`` and the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ebbtide.errors import BudgetError
from ebbtide.planners import Problem
from ebbtide.planners.base import changes_to
from ebbtide.planners.narration import interruption_noted
from ebbtide.planning.alternatives import Hints, best_of, plan_by
from ebbtide.planning.asked import DEFAULT_EFFORT, Asked, PlanningOptions
from ebbtide.planning.cache import CachedAnswer
from ebbtide.planning.one_program import is_legal, plan_of_one, with_smallest
from ebbtide.planning.step_end import NOTHING_AFTER, StepEnd
from ebbtide.report.plan import Plan
from ebbtide.step.program import Program
from ebbtide.step.provenance import Planned
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.units import Budget

__all__ = ["DEFAULT_EFFORT", "PlanningOptions", "full_search", "make_plan", "refined"]

REWRITE = frozenset({"auto", "auto_free", "greedy", "least_memory"})
"""Planners that may plan another program than the captured one. What stands for a paper's plans what it is given."""
_QUICK = frozenset({"auto", "least_memory"})
"""Planners of which a quick plan may be asked; of others a user wants what they are known for."""


def make_plan(
    program: Program,
    budget: Budget,
    *,
    resident_bytes: int,
    reserve_bytes: int = 0,
    end: StepEnd = NOTHING_AFTER,
    seeds: Sequence[Schedule] = (),
    options: PlanningOptions | None = None,
) -> Plan:
    """The best plan found for ``program`` within ``budget``.

    Args:
        program: with costs.
        budget: bytes, or a share of the unplanned peak (resident part included).
        resident_bytes: bytes resident at a step's start, state that is still to come among them.
        reserve_bytes: bytes to keep free inside the budget besides.
        end: what is taken when the backward has returned, which the budget has to hold as well.
        seeds: schedules to start from.
        options: how to plan.

    Raises:
        BudgetError: if no schedule within the budget was found.
        UsageError: for an unknown planner, or a tier to which the machine has no link.
    """
    options = options or PlanningOptions()
    if budget.share is not None and budget.share > 1.0:
        notes = {**options.provenance.notes, "share": str(budget)}
        options = replace(options, provenance=replace(options.provenance, notes=notes))
    with interruption_noted(changes_to(options.progress)) as progress:
        quick = options.quick and options.planner in _QUICK
        options = replace(options, progress=progress, quick=quick)
        asked = Asked(
            budget=budget,
            resident_bytes=resident_bytes,
            reserve_bytes=reserve_bytes,
            end=end,
            seeds=seeds,
            options=options,
        )
        if quick:
            with contextlib.suppress(BudgetError):
                return _plan_of_any(program, asked)
        return _plan_of_any(program, replace(asked, options=replace(options, quick=False)))


def _plan_of_any(program: Program, asked: Asked) -> Plan:
    """The best plan found for ``program`` or one of its alternatives."""
    options, alternatives = asked.options, asked.options.alternatives
    if alternatives is None or options.planner not in REWRITE:
        return plan_of_one(program, options.rewritten, asked)
    within = Budget(bytes=asked.budget_bytes(program))
    above_budget = asked.budget_bytes(program) - asked.held_bytes
    plan_one = partial(plan_of_one, asked=replace(asked, budget=within))
    captured = options.problem(program, above_budget)

    def choose(plan: Plan) -> None:
        if options.cache is not None:
            rewrites = () if plan.rewritten is None else plan.rewritten.rewrites
            options.cache.choose(options.planner, captured, alternatives.among, rewrites)

    if options.made is not None:
        options.made.choose = choose
    chosen = None if options.cache is None else options.cache.chosen(options.planner, captured, alternatives.among)
    if chosen is not None:
        with contextlib.suppress(BudgetError):
            if (plan := plan_by(program, alternatives, chosen, plan_one)) is not None:
                return plan
    hints = Hints.of(options.other_plans, program, above_budget, quick=options.quick)
    if options.quick and unplanned_bytes(program) > above_budget:
        for known in hints.latest:  # as another shape of about as much room
            with contextlib.suppress(BudgetError):
                plan = plan_by(program, alternatives, known, plan_one)
                if plan is not None and plan.overhead <= hints.most_overhead:
                    return plan
    stop = options.interrupt
    several = replace(asked, budget=within, options=replace(options, plan_only=True))
    plan = best_of(
        program,
        alternatives,
        above_budget,
        partial(plan_of_one, asked=several),
        interrupted=lambda: stop is not None and bool(stop),
        links=options.links,
        hints=hints,
    )
    if not stop and alternatives.all_known:
        choose(plan)
    return plan if options.quick else with_smallest(plan, replace(asked, budget=within))


def full_search(plan: Plan, options: PlanningOptions) -> Problem:
    """What is to be searched for a better plan than ``plan``, which was found quickly with ``options``."""
    options = replace(options, tiers=plan.tiers).with_tiers()
    above_budget = plan.budget_bytes - plan.resident_bytes - plan.reserve_bytes
    return options.problem(plan.program, above_budget, seeds=(plan.schedule,))


def refined(
    plan: Plan, problem: Problem, found: CachedAnswer, options: PlanningOptions, end: StepEnd = NOTHING_AFTER
) -> Plan | None:
    """``plan`` with what a full search has found, kept for the next start; ``None`` if it found nothing that holds.

    Args:
        plan: that was found quickly.
        problem: what was searched (:func:`full_search`).
        found: the answer, which is not trusted.
        options: how the plan was made.
        end: what is taken when the backward has returned.
    """
    answer = found.answer
    if answer.schedule is None or not is_legal(problem, answer.schedule, problem.above_budget_bytes):
        return None
    if options.cache is not None:
        options.cache.store(plan.planner, problem, found)
    if options.buckets is not None and not problem.links:
        options.buckets.learn(plan.planner, problem, answer, None)
    above = simulate(plan.program, answer.schedule, plan.machine).above_bytes
    least = above if found.smallest_above_bytes is None else min(above, found.smallest_above_bytes)
    bound = answer.bound if plan.rewritten is None else plan.rewritten.overhead_of(answer.bound, plan.program)
    return replace(
        plan,
        schedule=answer.schedule,
        status=answer.status,
        smallest_bytes=max(
            end.needed_bytes(plan.program, plan.resident_bytes), plan.resident_bytes + plan.reserve_bytes + least
        ),
        smallest_is_searched=found.smallest_above_bytes is not None,
        bound=bound,
        provenance=replace(
            plan.provenance,
            planned=Planned.SEARCHED,
            effort=problem.effort,
            notes={**plan.provenance.notes, **answer.notes},
        ),
    )

"""The best plan of one program: what is known of it, else what a search finds, or a refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ebbtide.planners import Interrupt, Problem, Progress, Status, planner_named
from ebbtide.planners.base import Answer
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.hybrid.floor import floor_with_tiers
from ebbtide.planners.registry import finds_smallest
from ebbtide.planners.search import smallest as smallest_search
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning.asked import QUICK_EFFORT, Asked, PlanningOptions
from ebbtide.planning.cache import CachedAnswer
from ebbtide.planning.refusals import budget_error, end_error
from ebbtide.report.plan import Plan
from ebbtide.step.legality import check
from ebbtide.step.program import Program
from ebbtide.step.provenance import Planned, Provenance
from ebbtide.step.rewrite import Rewritten
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import overhead_of, simulate
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.units import format_bytes

__all__ = ["is_legal", "plan_of_one", "smallest_told", "with_smallest"]

ROOM_FOR_A_LOSS = 4
"""Times what a forward returns: what a step that waits for a loss outside has to leave, or its plan is searched for."""


@dataclass(frozen=True)
class _Found:
    """What is known of a problem.

    Attributes:
        answer: the planner's.
        smallest_bytes: least bytes above the step's start for which a plan is known; ``None`` if not looked for.
        smallest: that plan, if it was looked for just now.
        planned: how the answer came about.
        cached: the answer as the cache has it; ``None`` if it has none.
        fitted: whether it comes from another shape's, so that it is neither kept nor learned from.
    """

    answer: Answer
    smallest_bytes: int | None
    smallest: Schedule | None = None
    planned: Planned = Planned.SEARCHED
    cached: CachedAnswer | None = None
    fitted: bool = False

    @property
    def provenance(self) -> Planned:
        """How the answer came about: what is optimal is not found better by a search."""
        if self.planned is not Planned.QUICKLY or self.answer.status is not Status.OPTIMAL:
            return self.planned
        return Planned.SEARCHED if self.cached is None else Planned.CACHED


def plan_of_one(program: Program, rewritten: Rewritten | None, asked: Asked) -> Plan:
    """The best plan found for ``program`` alone, which is the captured one or comes from it as ``rewritten`` says.

    Args:
        program: with costs.
        rewritten: how it comes from the captured one, whose schedules ``asked.seeds`` are.
        asked: the budget, and how to plan.

    Raises:
        BudgetError: if no schedule within the budget was found.
        UsageError: for an unknown planner, or a tier to which the machine has no link.
    """
    begin = time.perf_counter()
    asked = _of_program(program, rewritten, asked)
    options, budget_bytes = asked.options, asked.budget_bytes(program)
    problem = _problem(program, asked)
    told = smallest_told(options.progress, None, partial(asked.budget_for, program), _beyond(problem))
    end_needs = asked.end.needed_bytes(program, asked.resident_bytes)
    if budget_bytes < end_needs and (
        options.quick or asked.held_bytes + _smallest(problem, options, told)[0] <= end_needs
    ):
        raise end_error(asked, program)  # else any plan is too large already
    found = _known(problem, options)
    if found is None and options.quick and problem.effort > QUICK_EFFORT:
        problem = replace(problem, effort=QUICK_EFFORT)
        found = replace(_cached(problem, options) or _searched(problem, program, asked), planned=Planned.QUICKLY)
    if found is None:
        found = _searched(problem, program, asked)
    if found.smallest_bytes is None and not (options.quick or (options.plan_only and found.answer.schedule)):
        found = replace(found, smallest_bytes=_smallest(problem, options, told)[0])
    if found.smallest is not None:
        problem = replace(problem, seeds=(*problem.seeds, found.smallest))
    if found.answer.schedule is None and not problem.interrupt:
        _keep(found, problem, options)
    answer, schedule = found.answer, found.answer.schedule
    if schedule is None and problem.interrupt and (schedule := _cheapest(problem)) is not None:
        found = replace(found, answer=(answer := replace(answer, status=Status.TIME_LIMIT, schedule=schedule)))
    floor_above, floor_op = _floor(problem)
    floor = asked.held_bytes + floor_above
    if schedule is None:
        least = unplanned_bytes(program) if found.smallest_bytes is None else found.smallest_bytes
        raise budget_error(
            asked,
            program,
            floor=(floor, floor_op),
            smallest=max(asked.budget_for(program, least), options.known_smallest_bytes),
            unplanned=_unplanned(asked, program, rewritten),
            interrupted=problem.interrupt.interrupted,
        )
    if budget_bytes < end_needs:  # a planner has found a smaller plan than were known
        raise end_error(asked, program)
    above = simulate(program, schedule, options.machine).above_bytes
    least = above if found.smallest_bytes is None else min(found.smallest_bytes, above)  # a planner may get below it
    is_searched = found.smallest_bytes is not None and (found.planned is Planned.CACHED or not options.quick)
    _keep(replace(found, smallest_bytes=least if is_searched else None), problem, options)
    options.progress(Progress("planned", _overhead(problem, schedule), answer.bound))
    plan = Plan(
        program=program,
        schedule=schedule,
        status=answer.status,
        case=program.name,
        planner=options.planner,
        budget_bytes=budget_bytes,
        resident_bytes=asked.resident_bytes,
        reserve_bytes=asked.reserve_bytes,
        floor_bytes=floor,
        floor_op=floor_op,
        smallest_bytes=asked.budget_for(program, least),
        smallest_is_searched=is_searched,
        bound=answer.bound if rewritten is None else rewritten.overhead_of(answer.bound, program),
        bound_class=answer.bound_class + ("" if rewritten is None else ", program: as rewritten"),
        plan_seconds=time.perf_counter() - begin,
        provenance=replace(
            Provenance.from_dict({**program.context, **options.provenance, **answer.notes}),
            planned=found.provenance,
            effort=problem.effort,
            seed=options.seed,
        ),
        machine=options.machine,
        tiers=tuple(problem.links),
        rewritten=rewritten,
        resident_parts=options.resident_parts,
    )
    if options.made is not None:
        options.made.plans.append(plan)
    return plan


def with_smallest(plan: Plan, asked: Asked) -> Plan:
    """``plan``, with the smallest budget of its program looked for if it was not, and kept so for later starts."""
    if plan.smallest_is_searched:
        return plan
    begin, program = time.perf_counter(), plan.program
    asked = _of_program(program, plan.rewritten, asked)
    problem = _problem(program, asked)
    told = smallest_told(asked.options.progress, plan.overhead, partial(asked.budget_for, program))
    least, smallest = _smallest(problem, asked.options, told)
    least = min(least, plan.timeline.above_bytes)
    if asked.options.cache is not None and (cached := asked.options.cache.load(plan.planner, problem)) is not None:
        asked.options.cache.store(plan.planner, problem, replace(cached, smallest_above_bytes=least))
    if asked.options.buckets is not None:
        asked.options.buckets.learn_smallest(program, smallest)
    return replace(
        plan,
        smallest_bytes=asked.budget_for(program, least),
        smallest_is_searched=True,
        plan_seconds=plan.plan_seconds + time.perf_counter() - begin,
    )


def _of_program(program: Program, rewritten: Rewritten | None, asked: Asked) -> Asked:
    """``asked`` of ``program``: with the tiers and start points that are its own, and told of as it is rewritten."""
    options, seeds = asked.options.with_tiers(), asked.seeds
    if rewritten is not None:
        seeds = [each.schedule for each in options.other_plans if each.program.fingerprint == program.fingerprint]
        options = replace(options, progress=_telling_of(rewritten, program, options.progress))
    return replace(asked, options=options, seeds=seeds)


def _problem(program: Program, asked: Asked) -> Problem:
    """What is asked, as planners take it."""
    options = asked.options
    interrupt = Interrupt() if options.interrupt is None else options.interrupt
    if options.time_limit_seconds is not None:
        interrupt = interrupt.or_after(options.time_limit_seconds)
    problem = options.problem(program, asked.budget_bytes(program) - asked.held_bytes)
    # A seed that moves may be from where there were other tiers.
    legal = tuple(each for each in asked.seeds if not each.moves or is_legal(problem, each))
    return replace(problem, seeds=legal, interrupt=interrupt, progress=options.progress)


def _searched(problem: Problem, program: Program, asked: Asked) -> _Found:
    """What a search finds where nothing is known."""
    options = asked.options
    finds = finds_smallest(options.planner)
    plan_with = planner_named(options.planner)
    beyond = _beyond(problem)
    if beyond is not None and (finds or options.quick):  # proven: no planner has to be asked for a plan
        least, smallest = (None, None)
        if not options.quick:
            told = smallest_told(options.progress, None, partial(asked.budget_for, program), beyond)
            told(unplanned_bytes(program))
            least, smallest = _smallest(problem, options, told)
        return _Found(Answer(Status.INFEASIBLE, None), least, smallest)
    near = [] if options.cache is None else options.cache.near(problem)
    problem = replace(problem, seeds=(*problem.seeds, *(each for each in near if is_legal(problem, each))))
    answer = plan_with(problem) if finds else None  # so that plans come sooner
    if answer is not None and (options.quick or (options.plan_only and answer.schedule is not None)):
        return _Found(answer, None)
    best = None if answer is None or answer.schedule is None else _overhead(problem, answer.schedule)
    told = smallest_told(options.progress, best, partial(asked.budget_for, program))
    told(unplanned_bytes(program))
    least, smallest = _smallest(problem, options, told)
    if options.quick and problem.above_budget_bytes - least < ROOM_FOR_A_LOSS * program.returned_bytes:
        in_full = replace(options, quick=False)  # what is found quickly leaves too little to who comes between
        least, smallest = _smallest(problem, in_full, told)
    if problem.above_budget_bytes >= least:
        problem = replace(problem, seeds=(*problem.seeds, smallest))
        if answer is not None and answer.schedule is None:  # with little effort a planner finds less
            answer = None
    return _Found(answer or plan_with(problem), least, smallest)


def _telling_of(
    rewritten: Rewritten, program: Program, progress: Callable[[Progress], None]
) -> Callable[[Progress], None]:
    """``progress`` of another program in the captured one's place: it is named, and overheads are over the captured."""
    rules = ", ".join(sorted({each.rule for each in rewritten.rewrites}))

    def tell(each: Progress) -> None:
        best, bound = (rewritten.overhead_of(value, program) for value in (each.best_overhead, each.bound))
        progress(replace(each, stage=f"{each.stage}, with {rules}", best_overhead=best, bound=bound))

    return tell


def _unplanned(asked: Asked, program: Program, rewritten: Rewritten | None) -> int:
    """The peak that shares are of: that of the captured program."""
    end, resident = asked.end, asked.resident_bytes
    if rewritten is None:
        return end.unplanned_bytes(program, resident)
    return max(resident + rewritten.above_bytes + end.held_bytes, end.needed_bytes(program, resident))


def _floor(problem: Problem) -> tuple[int, int]:
    """Proven bytes above the step's start, and the op that pins them."""
    links = problem.links
    return floor_with_tiers(problem.program, links) if links else floor_bytes(problem.program)


def _known(problem: Problem, options: PlanningOptions) -> _Found | None:
    """What is known without a search: this very problem's answer, or that of another shape, fitted."""
    if (cached := _cached(problem, options)) is not None:
        return cached
    if options.buckets is None:
        return None
    fitted = options.buckets.answer(options.planner, problem, quick=options.quick)
    if fitted is None:
        return None
    known, is_good = fitted
    planned = Planned.ADAPTED if is_good else Planned.QUICKLY
    return _Found(known.answer, known.smallest_above_bytes, planned=planned, fitted=True)


def _cached(problem: Problem, options: PlanningOptions) -> _Found | None:
    """What the cache has for this very problem; a refusal alone is believed, a plan has to be legal and to fit."""
    cached = None if options.cache is None else options.cache.load(options.planner, problem)
    if cached is None:
        return None
    schedule = cached.answer.schedule
    if schedule is not None and not is_legal(problem, schedule, problem.above_budget_bytes):
        return None
    return _Found(cached.answer, cached.smallest_above_bytes, planned=Planned.CACHED, cached=cached)


def _keep(found: _Found, problem: Problem, options: PlanningOptions) -> None:
    """Keep for later starts what was found for a problem, and for other shapes what may be fitted to them."""
    if found.fitted:
        return
    kept = CachedAnswer(found.answer, found.smallest_bytes)
    if options.cache is not None and found.cached != kept and (kept.answer.schedule is not None or not options.quick):
        options.cache.store(options.planner, problem, kept)
    if options.buckets is not None and found.answer.schedule is not None:
        options.buckets.learn(options.planner, problem, found.answer, found.smallest)


def _beyond(problem: Problem) -> int | None:
    """The floor of a problem, bytes above the step's start, where that is proof that nothing fits."""
    floor = _floor(problem)[0]
    return floor if floor > problem.above_budget_bytes else None


def smallest_told(
    progress: Callable[[Progress], None],
    best: float | None,
    budget_of: Callable[[int], int],
    beyond: int | None = None,
) -> Callable[[int], None]:
    """Tells ``progress`` of ever smaller budgets, given bytes above the step's start and what budget they need.

    Args:
        progress: is told.
        best: overhead of the best plan so far.
        budget_of: from bytes to a budget.
        beyond: the floor, where the budget is below it.
    """
    least: int | None = None
    stage = "looking for the smallest workable budget"
    if beyond is not None:
        stage = f"it does not fit, no plan takes less than {format_bytes(budget_of(beyond))}; {stage}"

    def tell(above_bytes: int) -> None:
        nonlocal least
        least = above_bytes if least is None else min(above_bytes, least)
        progress(Progress(stage, best, smallest_bytes=budget_of(least)))

    return tell


def _smallest(problem: Problem, options: PlanningOptions, tell: Callable[[int], None]) -> tuple[int, Schedule]:
    """The least bytes above a step's start for which a schedule is known, and that schedule.

    It is told to users: a time limit must not make it larger than it is.
    """
    known = None if options.buckets is None else options.buckets.smallest(problem)
    if known is not None:
        return known
    cache = None if options.quick else options.cache
    kept = None if cache is None else cache.least(problem)
    if kept is not None and is_legal(problem, kept):
        return simulate(problem.program, kept, problem.machine).above_bytes, kept
    limitless = problem.interrupt.without_limit()
    effort = min(QUICK_EFFORT, smallest_search.FIRST_EFFORT) if options.quick else None
    found = smallest_of(problem.program, effort, limitless, problem.links, tell)
    if cache is not None and not limitless:
        cache.keep_least(problem, found[1])
    return found


def is_legal(problem: Problem, schedule: Schedule, above_budget_bytes: int | None = None) -> bool:
    """Whether a schedule that was made for any program is one of this program and tiers, within a budget if given."""
    try:
        return not check(problem.program, schedule, above_budget_bytes, problem.links)
    except IndexError:
        return False


def _overhead(problem: Problem, schedule: Schedule) -> float:
    return overhead_of(problem.program, schedule, problem.machine)


def _cheapest(problem: Problem) -> Schedule | None:
    """The seed of least time that fits, for a planner that was stopped before it had any plan."""
    timelines = [(simulate(problem.program, each, problem.machine), each) for each in problem.seeds]
    fitting = [
        (each.seconds, index)
        for index, (each, _) in enumerate(timelines)
        if each.above_bytes <= problem.above_budget_bytes
    ]
    return timelines[min(fitting)[1]][1] if fitting else None

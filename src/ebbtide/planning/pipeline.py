"""From a program and a budget to a plan: one way for ``plan``, ``fit``, ``sweep`` and the command line."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ebbtide.errors import BudgetError, UsageError
from ebbtide.options import Options
from ebbtide.planners import Interrupt, Problem, Progress, Status, planner_named
from ebbtide.planners.base import AS_CAPTURED, DEFAULT_EFFORT, Answer, changes_to, silent
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.hybrid.floor import floor_with_tiers
from ebbtide.planners.narration import interruption_noted
from ebbtide.planners.registry import finds_smallest, moves_buffers
from ebbtide.planners.search import smallest as smallest_search
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning.alternatives import Alternatives, Hints, best_of, plan_by
from ebbtide.planning.cache import CachedAnswer, PlanCache
from ebbtide.planning.shape_plans import Buckets
from ebbtide.planning.step_end import LOSS_TO_COME, NOTHING_AFTER, StepEnd, budget_to_ask_for, share_of_unplanned
from ebbtide.report.plan import Plan
from ebbtide.step.legality import check
from ebbtide.step.machine import Link, Machine, catalogue
from ebbtide.step.program import Program
from ebbtide.step.provenance import LossPlace, Planned, Provenance
from ebbtide.step.refused_budget import refused_budget
from ebbtide.step.resident_in_words import OPTIMIZER_STATE, WEIGHTS
from ebbtide.step.rewrite import Rewrite, Rewritten
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import overhead_of, simulate
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.units import Budget, format_allowed, format_bytes

__all__ = ["DEFAULT_EFFORT", "PlanningOptions", "full_search", "make_plan", "refined", "smallest_told"]


_NO_STATE = 'tiers="disk", options=ebbtide.Options(offload_optimizer=True) keeps no state'
_NO_GRADIENTS = 'step="inside" with optimizer= keeps no gradients'
_SMALL_NUMBER = 100
"""Bytes up to which a budget is rather meant as a share."""
QUICK_EFFORT = 2_000
"""Local-search moves of a plan that is to be found quickly: a tenth of the default's, and of its solvers' work."""
REWRITE = frozenset({"auto", "auto_free", "greedy", "least_memory"})
"""Planners that may plan another program than the captured one. What stands for a paper's plans what it is given."""
ROOM_FOR_A_LOSS = 4
"""Times what a forward returns: what a step that waits for a loss outside has to leave, or its plan is searched for."""
_QUICK = frozenset({"auto", "least_memory"})
"""Planners of which a quick plan may be asked; of others a user wants what they are known for."""


@dataclass(eq=False)
class Made:
    """What is made on the way to a plan.

    Attributes:
        plans: of each program that was tried one, not the best of them alone.
        choose: keeps for the next start by which rewrites the best plan came about.
    """

    plans: list[Plan] = field(default_factory=list[Plan])
    choose: Callable[[Plan], None] = lambda _: None


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """How to plan."""

    planner: str = "auto"
    """Name of the planner."""
    effort: int = DEFAULT_EFFORT
    """Local-search moves; plans are reproducible for one effort and seed."""
    seed: int = 0
    """Of every random choice."""
    time_limit_seconds: float | None = None
    """Cuts planning off; the plan then says ``TIME_LIMIT``."""
    machine: Machine | None = None
    """For transfers; planners that only recompute ignore it."""
    tiers: tuple[str, ...] = ()
    """That buffers may be moved to, the preferred one first; planners that only recompute ignore them."""
    interrupt: Interrupt | None = None
    """Set by Ctrl-C; the best plan so far is kept."""
    progress: Callable[[Progress], None] = field(default=silent)
    """Called with what is known while planning."""
    provenance: Provenance = field(default_factory=Provenance)
    """What is known of where the program comes from, to be kept in the plan."""
    resident_parts: Mapping[str, int] = field(default_factory=dict[str, int])
    """What is resident by kind, where that is known; likewise."""
    cache: PlanCache | None = None
    """Where answers are kept, and start points taken from; ``None`` plans anew, from the given seeds alone."""
    buckets: Buckets | None = None
    """What was searched for other shapes of the same model, for the planners ``auto`` and ``least_memory``."""

    alternatives: Alternatives | None = None
    """Other programs for the same step, for the planners of :data:`REWRITE`."""
    rewritten: Rewritten | None = None
    """How the program at hand comes from the captured one, if it is another."""
    other_plans: Sequence[Plan] = ()
    """Plans of the step that are at hand: those of an alternative's own program are start points of it."""

    known_smallest_bytes: int = 0
    """Below which a budget was refused for what no program shows: a refusal names no less."""
    quick: bool = False
    """Whether what is found quickly will do: with :data:`QUICK_EFFORT`, and no search for the smallest budget.

    Only where nothing is found so, everything is searched: a refusal names the smallest budget."""
    made: Made | None = None
    """Takes every plan that is made on the way."""
    takes_shares: bool = True
    """Whether a refusal may advise a share: for one caller a budget is always in bytes."""
    takes_inside: Callable[[], bool] = field(default=lambda: True)
    """Whether it may advise to have the optimizer step in the backward, which not every optimizer or trainer can."""

    @staticmethod
    def of(options: Options) -> PlanningOptions:
        """The part of ``options`` that planning a captured step needs."""
        return PlanningOptions(
            planner=options.planner,
            effort=options.effort,
            seed=options.seed,
            time_limit_seconds=options.time_limit,
            machine=options.target,
            interrupt=options.interrupt,
            progress=options.tell,
        )


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
    asked = partial(
        _plan_of_any,
        program,
        budget,
        resident_bytes=resident_bytes,
        reserve_bytes=reserve_bytes,
        end=end,
        seeds=seeds,
    )
    with interruption_noted(changes_to(options.progress)) as progress:
        options = replace(options, progress=progress, quick=options.quick and options.planner in _QUICK)
        if options.quick:
            with contextlib.suppress(BudgetError):
                return asked(options=options)
        return asked(options=replace(options, quick=False))


def _plan_of_any(
    program: Program,
    budget: Budget,
    *,
    resident_bytes: int,
    reserve_bytes: int,
    end: StepEnd,
    seeds: Sequence[Schedule],
    options: PlanningOptions,
) -> Plan:
    """The best plan found for ``program`` or one of its alternatives; the arguments are those of :func:`make_plan`."""
    told = replace(options, alternatives=None)
    if options.alternatives is None or options.planner not in REWRITE:
        return _best_plan(program, None, budget, resident_bytes, reserve_bytes, end, seeds=seeds, options=told)
    within = Budget(bytes=end.budget_bytes(budget, program, resident_bytes, reserve_bytes))
    assert within.bytes is not None
    above_budget = within.bytes - resident_bytes - reserve_bytes
    stop = options.interrupt
    plan_one = partial(
        _best_plan,
        budget=within,
        resident_bytes=resident_bytes,
        reserve_bytes=reserve_bytes,
        end=end,
        seeds=seeds,
        options=told,
    )
    choose = partial(_choose, program, above_budget, told, options.alternatives.among)
    if options.made is not None:
        options.made.choose = choose
    rewrites = _chosen(program, above_budget, told, options.alternatives.among)
    if rewrites is not None:
        with contextlib.suppress(BudgetError):
            if (plan := plan_by(program, options.alternatives, rewrites, plan_one)) is not None:
                return plan
    hints = Hints.of(options.other_plans, program, above_budget)
    if options.quick and unplanned_bytes(program) > above_budget:
        for known in hints.latest:  # as another shape of about as much room
            with contextlib.suppress(BudgetError):
                plan = plan_by(program, options.alternatives, known, plan_one)
                if plan is not None and plan.overhead <= hints.most_overhead:
                    return plan
    plan = best_of(
        program,
        options.alternatives,
        above_budget,
        plan_one,
        interrupted=lambda: stop is not None and bool(stop),
        links=_links(told),
        hints=hints,
    )
    if not stop and options.alternatives.all_known:
        choose(plan)
    return plan


def _chosen(
    program: Program, above_budget_bytes: int, options: PlanningOptions, among: str
) -> tuple[Rewrite, ...] | None:
    """By which rewrites the best plan of a captured program came about at an earlier start."""
    if options.cache is None:
        return None
    return options.cache.chosen(options.planner, _captured_problem(program, above_budget_bytes, options), among)


def _choose(program: Program, above_budget_bytes: int, options: PlanningOptions, among: str, plan: Plan) -> None:
    """Keep that for the next start."""
    if options.cache is not None:
        rewrites = () if plan.rewritten is None else plan.rewritten.rewrites
        problem = _captured_problem(program, above_budget_bytes, options)
        options.cache.choose(options.planner, problem, among, rewrites)


def _captured_problem(program: Program, above_budget_bytes: int, options: PlanningOptions) -> Problem:
    return Problem(
        program=program,
        above_budget_bytes=above_budget_bytes,
        machine=options.machine,
        effort=options.effort,
        seed=options.seed,
        tiers=options.tiers,
    )


def full_search(plan: Plan, options: PlanningOptions) -> Problem:
    """What is to be searched for a better plan than ``plan``, which was found quickly with ``options``."""
    options = _with_tiers(replace(options, tiers=plan.tiers))
    return Problem(
        program=plan.program,
        above_budget_bytes=plan.budget_bytes - plan.resident_bytes - plan.reserve_bytes,
        machine=options.machine,
        effort=options.effort,
        seed=options.seed,
        seeds=(plan.schedule,),
        tiers=options.tiers,
    )


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
    if answer.schedule is None or not _is_legal(problem, answer.schedule, problem.above_budget_bytes):
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


def _telling_of(
    rewritten: Rewritten, program: Program, progress: Callable[[Progress], None]
) -> Callable[[Progress], None]:
    """``progress`` of another program in the captured one's place: it is named, and overheads are over the captured."""
    rules = ", ".join(sorted({each.rule for each in rewritten.rewrites}))

    def tell(each: Progress) -> None:
        best, bound = (rewritten.overhead_of(value, program) for value in (each.best_overhead, each.bound))
        progress(replace(each, stage=f"{each.stage}, with {rules}", best_overhead=best, bound=bound))

    return tell


def _best_plan(
    program: Program,
    rewritten: Rewritten | None,
    budget: Budget,
    resident_bytes: int,
    reserve_bytes: int,
    end: StepEnd,
    *,
    seeds: Sequence[Schedule],
    options: PlanningOptions,
) -> Plan:
    """The best plan found for ``program`` alone, which is the captured one or comes from it as ``rewritten`` says.

    ``seeds`` are schedules of the captured program.
    """
    if rewritten is not None:
        seeds = [each.schedule for each in options.other_plans if each.program.fingerprint == program.fingerprint]
        options = replace(options, rewritten=rewritten, progress=_telling_of(rewritten, program, options.progress))
    plan_with = planner_named(options.planner)
    options = _with_tiers(options)
    begin = time.perf_counter()
    unplanned_above = unplanned_bytes(program)
    budget_bytes = end.budget_bytes(budget, program, resident_bytes, reserve_bytes)
    held = resident_bytes + reserve_bytes
    above_budget = budget_bytes - held
    interrupt = Interrupt() if options.interrupt is None else options.interrupt
    if options.time_limit_seconds is not None:
        interrupt = interrupt.or_after(options.time_limit_seconds)
    problem = Problem(
        program=program,
        above_budget_bytes=above_budget,
        machine=options.machine,
        effort=options.effort,
        seed=options.seed,
        seeds=tuple(seeds),
        interrupt=interrupt,
        progress=options.progress,
        tiers=options.tiers,
    )
    links = problem.links
    # A seed that moves may be from where there were other tiers.
    problem = replace(problem, seeds=tuple(each for each in seeds if not each.moves or _is_legal(problem, each)))
    floor_above, floor_op = floor_with_tiers(program, links) if links else floor_bytes(program)
    end_needs = end.needed_bytes(program, resident_bytes)

    def budget_of(above_bytes: int) -> int:
        return max(end_needs, held + above_bytes)

    if budget_bytes < end_needs:
        told = smallest_told(options.progress, None, budget_of)
        if options.quick or held + _smallest(problem, options, told)[0] <= end_needs:
            raise _end_error(end, program, resident_bytes, budget_bytes, options)  # else any plan is too large already
    problem, known, planned = _known(problem, options)
    smallest: Schedule | None = None
    if known is not None:
        answer, smallest_above = known.answer, known.smallest_above_bytes
    else:
        near = [] if options.cache is None else options.cache.near(problem)
        problem = replace(problem, seeds=(*problem.seeds, *(each for each in near if _is_legal(problem, each))))
        finds = finds_smallest(options.planner)
        answer, smallest_above = None, None
        if options.quick and floor_above > above_budget:
            answer = Answer(Status.INFEASIBLE, None)
        elif finds:
            answer = plan_with(problem)  # so that plans come sooner
        if not (options.quick and finds):
            best = None if answer is None or answer.schedule is None else _overhead(problem, answer.schedule)
            tell_smallest = smallest_told(options.progress, best, budget_of)
            tell_smallest(unplanned_above)
            smallest_above, smallest = _smallest(problem, options, tell_smallest)
            if options.quick and above_budget - smallest_above < ROOM_FOR_A_LOSS * program.returned_bytes:
                in_full = replace(options, quick=False)  # what is found quickly leaves too little to who comes between
                smallest_above, smallest = _smallest(problem, in_full, tell_smallest)
            if above_budget >= smallest_above:
                problem = replace(problem, seeds=(*problem.seeds, smallest))
                if answer is not None and answer.schedule is None:  # with little effort a planner finds less
                    answer = None
        answer = answer or plan_with(problem)
    if smallest_above is None and not options.quick:
        smallest_above, _ = _smallest(problem, options, smallest_told(options.progress, None, budget_of))
    if answer.schedule is None and interrupt:
        answer = replace(answer, status=Status.TIME_LIMIT, schedule=_cheapest(problem))
    if answer.schedule is None:
        raise _budget_error(
            program,
            budget_bytes,
            floor=held + floor_above,
            smallest=max(
                budget_of(unplanned_above if smallest_above is None else smallest_above), options.known_smallest_bytes
            ),
            resident=held,
            reserve=reserve_bytes,
            unplanned=_unplanned(end, program, resident_bytes, options.rewritten),
            floor_op=floor_op,
            tiers=tuple(links),
            options=options,
            interrupted=interrupt.interrupted,
        )
    if budget_bytes < end_needs:  # a planner has found a smaller plan than were known
        raise _end_error(end, program, resident_bytes, budget_bytes, options)
    above = simulate(program, answer.schedule, options.machine).above_bytes
    if smallest_above is not None:  # a planner may get below what the search for it reached
        smallest_above = min(smallest_above, above)
    is_searched = smallest_above is not None and (planned is Planned.CACHED or not options.quick)
    kept = CachedAnswer(answer, smallest_above if is_searched else None)
    if options.cache is not None and planned is not Planned.ADAPTED and known != kept:
        options.cache.store(options.planner, problem, kept)
    if options.buckets is not None and planned is not Planned.ADAPTED:
        options.buckets.learn(options.planner, problem, answer, smallest)
    options.progress(Progress("planned", _overhead(problem, answer.schedule), answer.bound))
    plan = Plan(
        program=program,
        schedule=answer.schedule,
        status=answer.status,
        case=program.name,
        planner=options.planner,
        budget_bytes=budget_bytes,
        resident_bytes=resident_bytes,
        reserve_bytes=reserve_bytes,
        floor_bytes=held + floor_above,
        floor_op=floor_op,
        smallest_bytes=budget_of(above if smallest_above is None else smallest_above),
        smallest_is_searched=is_searched,
        bound=answer.bound if options.rewritten is None else options.rewritten.overhead_of(answer.bound, program),
        bound_class=answer.bound_class + ("" if options.rewritten is None else ", program: as rewritten"),
        plan_seconds=time.perf_counter() - begin,
        provenance=replace(
            Provenance.from_dict({**program.context, **options.provenance, **answer.notes}),
            planned=_planned(planned, answer, known),
            effort=problem.effort,
            seed=options.seed,
        ),
        machine=options.machine,
        tiers=tuple(links),
        rewritten=options.rewritten,
        resident_parts=options.resident_parts,
    )
    if options.made is not None:
        options.made.plans.append(plan)
    return plan


def _unplanned(end: StepEnd, program: Program, resident_bytes: int, rewritten: Rewritten | None) -> int:
    """The peak that shares are of: that of the captured program."""
    if rewritten is None:
        return end.unplanned_bytes(program, resident_bytes)
    return max(resident_bytes + rewritten.above_bytes + end.held_bytes, end.needed_bytes(program, resident_bytes))


def _with_tiers(options: PlanningOptions) -> PlanningOptions:
    """``options`` with the tiers that the planner uses; what other shapes have told is of plans that move nothing."""
    if not options.tiers or not moves_buffers(options.planner):
        return replace(options, tiers=())
    there = {} if options.machine is None else options.machine.links
    for tier in options.tiers:
        if tier not in there:
            name = "none is given" if options.machine is None else f"{options.machine.name!r} has none"
            raise UsageError(
                f"moving buffers needs a machine with a link to tier {tier!r}; {name}; "
                f"accepted: {', '.join(sorted(there)) or 'no tier'}",
                argument="tiers",
                value=tier,
                accepted=tuple(sorted(there)),
            )
    return replace(options, buckets=None)


def _links(options: PlanningOptions) -> Mapping[str, Link]:
    """To the tiers that plans may move buffers to."""
    there = {} if options.machine is None else options.machine.links
    return {tier: there[tier] for tier in options.tiers if tier in there} if moves_buffers(options.planner) else {}


def _known(problem: Problem, options: PlanningOptions) -> tuple[Problem, CachedAnswer | None, Planned]:
    """The problem as it is to be solved, what is known without a search, and how that was found.

    That is this very problem's answer, that of a bucket, or where a quick plan will do an earlier one.
    """
    if (cached := _cached(problem, options)) is not None:
        return problem, cached, Planned.CACHED
    fitted = None if options.buckets is None else options.buckets.answer(options.planner, problem)
    if fitted is not None:
        return problem, fitted, Planned.ADAPTED
    if not options.quick or problem.effort <= QUICK_EFFORT:
        return problem, None, Planned.SEARCHED
    problem = replace(problem, effort=QUICK_EFFORT)
    return problem, _cached(problem, options), Planned.QUICKLY


def _planned(planned: Planned, answer: Answer, known: CachedAnswer | None) -> Planned:
    """How the answer was found: what is optimal is not found better by a search."""
    if planned is not Planned.QUICKLY or answer.status is not Status.OPTIMAL:
        return planned
    return Planned.SEARCHED if known is None else Planned.CACHED


def _cached(problem: Problem, options: PlanningOptions) -> CachedAnswer | None:
    """What the cache has for this very problem."""
    return None if options.cache is None else _sound(options.cache.load(options.planner, problem), problem)


def smallest_told(
    progress: Callable[[Progress], None], best: float | None, budget_of: Callable[[int], int]
) -> Callable[[int], None]:
    """Tells ``progress`` of ever smaller budgets, given bytes above the step's start and what budget they need."""
    least: int | None = None

    def tell(above_bytes: int) -> None:
        nonlocal least
        least = above_bytes if least is None else min(above_bytes, least)
        progress(Progress("looking for the smallest workable budget", best, smallest_bytes=budget_of(least)))

    return tell


def _smallest(problem: Problem, options: PlanningOptions, tell: Callable[[int], None]) -> tuple[int, Schedule]:
    """The least bytes above a step's start for which a schedule is known, and that schedule.

    It is told to users: a time limit must not make it larger than it is.
    """
    known = None if options.buckets is None else options.buckets.smallest(problem)
    limitless = problem.interrupt.without_limit()
    effort = min(QUICK_EFFORT, smallest_search.FIRST_EFFORT) if options.quick else None
    return known or smallest_of(problem.program, effort, limitless, problem.links, tell)


def _sound(cached: CachedAnswer | None, problem: Problem) -> CachedAnswer | None:
    """What the cache gave if it is legal and fits, whatever its file says."""
    if cached is None or cached.answer.schedule is None:
        return None
    fits = _is_legal(problem, cached.answer.schedule, problem.above_budget_bytes)
    return cached if fits else None


def _is_legal(problem: Problem, schedule: Schedule, above_budget_bytes: int | None = None) -> bool:
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


def _machines_for(smallest: int, machine: Machine) -> str:
    """Which machines of the catalogue hold ``smallest`` bytes, where the one planned for is too small itself."""
    if not machine.memory_bytes or smallest <= machine.usable_bytes:
        return ""
    large = sorted((each.usable_bytes, name) for name, each in catalogue().items() if each.usable_bytes >= smallest)
    which = ", ".join(name for _, name in large)
    holding = f"of the catalogue, {which} would do" if large else "no machine of the catalogue has that much"
    room = f"{format_allowed(machine.memory_bytes)}, {format_allowed(machine.usable_bytes)} of it usable"
    return f". {machine.name} has {room}, which no plan that was found fits; {holding}"


def _moving_to(tiers: tuple[str, ...]) -> str:
    """What schedules may do besides recomputing."""
    return f", whatever they move to {' and '.join(tiers)}" if tiers else ""


def _end_error(
    end: StepEnd, program: Program, resident_bytes: int, budget_bytes: int, options: PlanningOptions
) -> BudgetError:
    return end.error(
        program,
        resident_bytes,
        budget_bytes,
        resident_parts=options.resident_parts,
        takes_shares=options.takes_shares,
        takes_inside=options.takes_inside,
        loss_unmeasured=_is_unmeasured(program, options),
    )


def _is_unmeasured(program: Program, options: PlanningOptions) -> bool:
    """Whether the loss is computed outside of the model, and what that takes is not known."""
    return options.provenance.loss is LossPlace.OUTSIDE and not program.between_bytes


def _budget_error(
    program: Program,
    budget: int,
    *,
    floor: int,
    smallest: int,
    resident: int,
    reserve: int,
    unplanned: int,
    floor_op: int,
    tiers: tuple[str, ...],
    options: PlanningOptions,
    interrupted: bool,
) -> BudgetError:
    pin = str(program.ops[floor_op]) if 0 <= floor_op < len(program.ops) else "what is resident"
    kept = ", which keeps what the model's checkpoints drop" if "checkpoints" in program.context else ""
    unmeasured = _is_unmeasured(program, options)
    if budget >= smallest:
        reason = f"planner {options.planner!r} found no schedule within the budget, which another one finds"
        remedy = "use planner='auto'"
    else:
        found = (
            "no plan within the budget was found" if floor < unplanned else "no plan takes less than the unplanned step"
        )
        reason = f"{found}{_if_a_share_is_meant(budget)}"
        remedy = (
            f"ask for {budget_to_ask_for(smallest, unplanned, takes_shares=options.takes_shares)}"
            + (LOSS_TO_COME if unmeasured else "")
            + f", or {_less_besides(program, budget, options, loss_outside=unmeasured)}"
            + ("" if options.machine is None else _machines_for(smallest, options.machine))
        )
    if interrupted:
        reason += ". The search was interrupted: a longer one may find a plan within less"
    return refused_budget(
        reason,
        remedy=remedy,
        budget_bytes=budget,
        floor_bytes=floor,
        smallest_bytes=smallest,
        resident_bytes=resident - reserve,
        resident_parts=options.resident_parts,
        pinned_by=pin,
        needs=[
            ("smallest for which a plan was found", smallest, share_of_unplanned(smallest, unplanned, reserve) + kept),
            ("floor", floor, f"of plans with {AS_CAPTURED}{_moving_to(tiers)}: pinned by {pin}"),
        ],
        reserve_bytes=reserve,
    )


def _less_besides(program: Program, budget: int, options: PlanningOptions, *, loss_outside: bool) -> str:
    """What else may help: not smaller inputs where weights, their gradients and an optimizer's state are too large."""
    made = sum(program.buffers[each].bytes for each in set(program.gradients))
    state = options.resident_parts.get(OPTIMIZER_STATE, 0)
    fixed = made + state + options.resident_parts.get(WEIGHTS, 0)
    if fixed <= budget:
        return ("return the loss from forward, or " if loss_outside else "") + "give the step smaller inputs"
    less = [_NO_GRADIENTS] * (bool(made) and options.takes_inside()) + [_NO_STATE] * bool(state)
    return (
        f"train fewer weights: weights, gradients and the optimizer's state take {format_bytes(fixed)} of any budget"
        + (f"; {', '.join(less)}" if less else "")
    )


def _if_a_share_is_meant(budget: int) -> str:
    return f" (a share is a text, '{budget}%')" if budget <= _SMALL_NUMBER else ""

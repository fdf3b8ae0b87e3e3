"""The default portfolio where first runs may leave captured order wherever that is legal.

1. Plan in captured order, with a bound for every order: the cut relaxation over what comes first in all of them
   (``cut_bound.FreeOrder``). On most training steps that ends it: forward and backward leave little choice.
2. Short annealing of whole sequences (``anneal``), from captured order and from the best order so far. What it is
   good at is finding orders; its reruns are poor. Each order it comes to is taken as the program's, and repaired to
   the budget greedily (``greedy``).
3. The best order is planned in like a captured one, by all of ``auto``.
4. The plan found is annealed as a sequence, where an order and its reruns are changed together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbtide.planners.auto import portfolio
from ebbtide.planners.base import FREE_ORDER, Answer, Problem, Status
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.reductions.reorder import reorder
from ebbtide.planners.registry import planner
from ebbtide.planners.search.greedy import PROVEN, Incumbent, assert_within, start_from
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.planners.search.orders import FreeOrder, first_runs
from ebbtide.planners.search.run_sequence import HOT, OVER, WARM, RunSequence, anneal_sequence
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import overhead_of, simulate
from ebbtide.step.unplanned import unplanned_schedule

__all__ = ["auto_free"]

FIRST_SHARE = 0.25  # of the effort, for the plan in captured order
SEARCHES = (1.5, 1.5, 1.5, 5.0, 5.0, 5.0, 20.0, 20.0)  # annealing moves per unit of effort: short ones first
FULL_OPS = 250  # moves grow with the program beyond this
POLISH = 20.0  # likewise, for step 4


@dataclass
class _Best:
    """The best schedule so far, of the program as captured."""

    problem: Problem
    schedule: Schedule | None = None
    overhead: float = float("inf")
    bound: float = 0.0

    def offer(self, schedule: Schedule | None) -> None:
        """Take a schedule if it is cheaper."""
        if schedule is None:
            return
        overhead = overhead_of(self.problem.program, schedule)
        if overhead < self.overhead:
            self.schedule, self.overhead = schedule, overhead

    @property
    def proven(self) -> bool:
        """Whether nothing can be better."""
        return self.overhead <= self.bound + PROVEN


@planner("auto_free", finds_smallest=True)
def auto_free(problem: Problem) -> Answer:
    """The best of captured order and of orders found, with a bound over all orders."""
    if (kept := keep_all(problem)).status is Status.OPTIMAL:
        return kept
    program = problem.program
    best = _Best(problem)
    for schedule in problem.seeds:
        if simulate(program, schedule).above_bytes <= problem.above_budget_bytes:
            best.offer(schedule)
    captured = _planned(replace(problem, effort=round(FIRST_SHARE * problem.effort)), program)
    best.bound = captured.bound or 0.0
    best.offer(captured.schedule)
    if any(op.until for op in program.ops):  # in another order, what is made again may have been changed
        return _answer(best)
    moves = problem.effort * max(1.0, len(program.ops) / FULL_OPS)
    order = None if best.proven else _best_order(best, moves)
    if not best.proven and not problem.interrupt:
        known = () if best.schedule is None else (best.schedule,)
        moved = reorder(program, order or unplanned_schedule(program).computes).reduce(replace(problem, seeds=known))
        answer = _planned(moved.problem, moved.problem.program)
        best.bound = max(best.bound, answer.bound or 0.0)
        best.offer(moved.lift(answer.schedule) if answer.schedule is not None else None)
    if not best.proven and best.schedule is not None and not problem.interrupt:
        sequence = RunSequence(program, problem.above_budget_bytes)
        if sequence.load(best.schedule.computes):
            sequence.keep_if_best()
            anneal_sequence(sequence, problem, round(POLISH * moves), problem.seed, over=0.0, hot=WARM)
            best.offer(_scheduled(program, sequence))
    return _answer(best)


def _planned(problem: Problem, program: Program) -> Answer:
    """The portfolio's answer in the program's own order, with a bound for every order."""
    return portfolio(problem, FreeOrder(program))


def _best_order(best: _Best, moves: float) -> list[int | None] | None:
    """The order of first runs in which greedy repair is cheapest, or ends lowest; ``None`` for captured order.

    Whatever is found on the way is offered.
    """
    problem, program = best.problem, best.problem.program
    chosen: list[int | None] | None = None
    least = (best.overhead, IntervalState(program).peak_bytes)
    for turn, share in enumerate(SEARCHES):
        if best.proven or problem.interrupt:
            break
        sequence = RunSequence(program, problem.above_budget_bytes)
        sequence.load(chosen if chosen is not None and turn % 2 else unplanned_schedule(program).computes)
        anneal_sequence(sequence, problem, round(share * moves), problem.seed + turn, over=OVER, hot=HOT)
        schedule = _scheduled(program, sequence)
        best.offer(schedule)
        order = first_runs(sequence.order() if schedule is None else schedule.computes)
        moved = reorder(program, order).reduce(replace(problem, seeds=()))
        found = Incumbent(moved.problem)
        peak = found.state.peak_bytes
        if start_from(found, []) and found.reruns is not None:
            found.state.load(found.reruns)
            best.offer(moved.lift(found.state.to_schedule()))
        if (found.overhead, peak) < least:
            chosen, least = order, (found.overhead, peak)
    return chosen


def _scheduled(program: Program, sequence: RunSequence) -> Schedule | None:
    """The best sequence that fits, if there is one."""
    return Schedule.from_computes(program, sequence.best_order()) if sequence.best_overhead < float("inf") else None


def _answer(best: _Best) -> Answer:
    """The best schedule, after simulator and legality checker have agreed to it."""
    stopped = bool(best.problem.interrupt)
    if best.schedule is None:
        status = Status.TIME_LIMIT if stopped else Status.INFEASIBLE
        return Answer(status, None, bound=best.bound, bound_class=FREE_ORDER)
    assert_within(best.problem, best.schedule)
    status = Status.OPTIMAL if best.proven else Status.TIME_LIMIT if stopped else Status.FEASIBLE
    return Answer(status, best.schedule, bound=best.bound, bound_class=FREE_ORDER)

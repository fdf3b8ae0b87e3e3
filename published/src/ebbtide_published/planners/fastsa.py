"""Simulated annealing of whole sequences, order included: FastSA (Jin et al., NeurIPS 2023, sections 3 and 4).

The state is a sequence of runs (``search.sequence``); a move adds, takes away or shifts a single run. First runs leave
captured order wherever that is legal, which is what this planner has over the others: some budgets need no rerun at
all if ops run in a better order.
1. From the unplanned step, several times: anneal ``max(budget, peak) * cost``, here with a weight on the bytes.
2. From what fits (that, a greedy plan of small effort, seeds): anneal the cost among sequences that fit.

A unit of effort is many moves, each far cheaper than a move of the local search in ``greedy``.
"""

from __future__ import annotations

from dataclasses import replace

from ebbtide.planners.base import FREE_ORDER, Answer, Problem, Status
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner
from ebbtide.planners.search.greedy import PROVEN, assert_within, greedy
from ebbtide.planners.search.run_sequence import HOT, OVER, WARM, RunSequence, anneal_sequence
from ebbtide.step.legality import check
from ebbtide.step.schedule import Schedule
from ebbtide.step.unplanned import unplanned_schedule

__all__ = ["anneal"]

MOVES_PER_EFFORT = 200  # 4 to 9 s for the default effort and 70 to 350 ops
GREEDY_SHARE = 0.1  # of the effort, for the greedy plan to start from
ROUNDS = 3  # from the unplanned step: free orders differ more between seeds than within one long run


@planner("anneal")
def anneal(problem: Problem) -> Answer:
    """Annealed sequences from the unplanned step, a greedy plan and the seeds."""
    if (kept := keep_all(problem)).status is Status.OPTIMAL:
        return kept
    sequence = RunSequence(problem.program, problem.above_budget_bytes)
    quick = greedy(replace(problem, effort=round(problem.effort * GREEDY_SHARE)))
    starts = [] if quick.schedule is None else [quick.schedule]
    for schedule in (*starts, *problem.seeds):
        _offer(sequence, schedule)
    moves = problem.effort * MOVES_PER_EFFORT // (ROUNDS + 1)
    for turn in range(ROUNDS):
        sequence.load(unplanned_schedule(problem.program).computes)
        anneal_sequence(sequence, problem, moves, problem.seed + turn, over=OVER, hot=HOT)
    if sequence.best_overhead < float("inf"):
        sequence.load(sequence.best_order())
        anneal_sequence(sequence, problem, moves, problem.seed + ROUNDS, over=0.0, hot=WARM)
    return _answer(problem, sequence)


def _offer(sequence: RunSequence, schedule: Schedule) -> None:
    """Take a start point as the best if it is legal, fits and is cheaper."""
    order = schedule.computes
    if not check(sequence.program, Schedule.from_computes(sequence.program, order)) and sequence.load(order):
        sequence.keep_if_best()


def _answer(problem: Problem, sequence: RunSequence) -> Answer:
    """The best sequence, after simulator and legality checker have agreed to it."""
    notes = {"moves": str(problem.effort * MOVES_PER_EFFORT)}
    interrupted = bool(problem.interrupt)
    if sequence.best_overhead == float("inf"):
        status = Status.TIME_LIMIT if interrupted else Status.INFEASIBLE
        return Answer(status, None, bound_class=FREE_ORDER, notes=notes)
    schedule = Schedule.from_computes(problem.program, sequence.best_order())
    assert_within(problem, schedule)
    if sequence.best_overhead <= PROVEN:  # no schedule runs less than every op once
        return Answer(Status.OPTIMAL, schedule, bound=0.0, bound_class=FREE_ORDER, notes=notes)
    status = Status.TIME_LIMIT if interrupted else Status.FEASIBLE
    return Answer(status, schedule, bound_class=FREE_ORDER, notes=notes)

"""What the other planners of a class find, held against a plan: on small programs none of them is better than ``auto``.

1. A *finalist* is a planner whose schedules keep captured order, as ``auto``'s do, and that takes little time: the
   greedy search and the published heuristics. Exact planners take minutes where they matter, and are none.
2. Greedy is asked twice: from the unplanned step and seeds alone, and from the schedule of least memory as well, which
   planning gives every planner that does not look for it. Neither always wins.
3. Where buffers may be moved the finalists are the published planners that move them, asked once the rest is done.
4. On programs of up to :data:`MOST_OPS` ops all finalists are asked, with the effort of the problem. Beyond, where a
   plan takes seconds, none is: the portfolio has their ideas as start points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ebbtide.planners.base import Answer, Problem, Progress, Status, planner_named, silent
from ebbtide.planners.search.greedy import PROVEN, assert_within
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import overhead_of

__all__ = ["FINALISTS", "MOST_OPS", "MOVING", "best_of_class"]

MOST_OPS = 300
FINALISTS = (
    "ap_greedy",
    "ap_sqrt",
    "chain",
    "chen_greedy",
    "chen_sqrt",
    "echo",
    "greedy",
    "linearized_greedy",
    "linearized_sqrt",
    "min_cut",
    "per_block",
    "revolve",
)
MOVING = ("capuchin", "libra:overlap=true", "swap", "tflms", "tflms:version=1")


def best_of_class(problem: Problem, answer: Answer) -> Answer:
    """``answer``, or with the same bound the plan of a finalist that is better."""
    if answer.status is Status.OPTIMAL or len(problem.program.ops) > MOST_OPS:
        return answer
    program, known = problem.program, answer.schedule
    least = float("inf") if known is None else overhead_of(program, known, problem.machine)
    chosen: tuple[str, Schedule] | None = None
    for name, asked in _asked(problem):
        if problem.interrupt:
            break
        problem.progress(Progress(f"asking {name}", least if least < float("inf") else None, answer.bound))
        found = planner_named(name)(asked).schedule
        if found is not None and (overhead := overhead_of(program, found, problem.machine)) < least:
            chosen, least = (name, found), overhead
    if chosen is None:
        return answer
    name, schedule = chosen
    assert_within(problem, schedule)
    proven = answer.bound is not None and least <= answer.bound + PROVEN
    status = Status.OPTIMAL if proven else Status.TIME_LIMIT if problem.interrupt else Status.FEASIBLE
    return replace(answer, status=status, schedule=schedule, notes={**answer.notes, "finalist": name})


def _asked(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Each finalist with what it is asked (definitions 2 and 3)."""
    quiet = replace(problem, progress=silent)
    if problem.links:
        for name in MOVING:
            yield name, quiet
        return
    for name in FINALISTS:
        yield name, quiet
    smallest, schedule = smallest_of(problem.program, interrupt=problem.interrupt)
    if smallest <= problem.above_budget_bytes:
        yield "greedy", replace(quiet, seeds=(*problem.seeds, schedule))

"""``auto`` is never worse than another planner of its class at the same effort: thirty programs with fixed seeds.

``benchmarks/planners.py --only best`` asks the same of a thousand.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ebbtide.planners import Answer, Interrupt, Problem, Status, planner_named, planner_names
from ebbtide.planners.base import silent
from ebbtide.planners.finalists import FINALISTS, MOST_OPS, MOVING, best_of_class
from ebbtide.planners.search.smallest import smallest_of, smallest_schedule
from ebbtide.step import legality
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.simulate import overhead_of
from ebbtide.step.unplanned import unplanned_bytes
from layered import SIZE, layered, linked
from random_moves import random_links
from strategies import chain

EFFORT = 300
TOLERANCE = 1e-6
OTHER_CLASS = {"auto", "auto_free", "anneal"}
CHILD = {"retention"}  # starts a process for each plan: in the benchmark
EXACT = {"checkmate", "checkmate_free", "checkmate_lp", "checkmate_lp_pure"}
EXACT_OPS, EXACT_SECONDS = 14, 2.0
SEEDS = range(30)


def program_of(seed: int) -> Program:
    """A forward whose ops read some of the last results, and a backward that visits them in reverse."""
    rng = random.Random(seed)
    forward = rng.choice((4, 6, 8, 12, 20, 40))
    buffers: list[Buffer] = []
    ops: list[Op] = []

    def op(inputs: set[int], size: int) -> int:
        buffers.append(Buffer(f"b{len(buffers)}", size, len(ops)))
        seconds = rng.randint(1, 9) * 1e-3
        ops.append(Op(f"op{len(ops)}", "test", tuple(sorted(inputs)), (len(buffers) - 1,), seconds=seconds))
        return len(buffers) - 1

    for index in range(forward):
        op({index - 1, rng.randrange(max(index - 5, 0), index)} if index else set(), rng.randint(1, 12))
    flow = forward - 1
    for index in range(forward - 1, -1, -1):
        flow = op({flow, index, max(index - 1, 0)}, buffers[index].bytes)
    return Program("mirrored", tuple(ops), tuple(buffers), forward, gradients=(flow,))


def problem_of(seed: int) -> Problem:
    program = program_of(seed)
    smallest, _ = smallest_schedule(program, effort=100)
    share = random.Random(-seed).uniform(0.05, 0.9)
    return Problem(program, int(smallest + share * (unplanned_bytes(program) - smallest)), effort=EFFORT)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_other_planner_of_its_class_is_better(seed: int) -> None:
    problem = problem_of(seed)
    ours = planner_named("auto")(problem)
    if ours.status is Status.OPTIMAL:
        return
    least = float("inf") if ours.schedule is None else overhead_of(problem.program, ours.schedule)
    left_out = OTHER_CLASS | CHILD | (EXACT if len(problem.program.ops) > EXACT_OPS else set())
    for name in sorted(set(planner_names()) - left_out):
        interrupt = Interrupt(EXACT_SECONDS if name in EXACT else None)
        theirs = planner_named(name)(replace(problem, interrupt=interrupt)).schedule
        assert theirs is None or overhead_of(problem.program, theirs) >= least - TOLERANCE, name


def test_a_better_finalist_is_taken_with_the_same_bound() -> None:
    program = chain(10)
    _, poor = smallest_schedule(program, effort=100)
    problem = Problem(program, unplanned_bytes(program) * 3 // 5, effort=EFFORT)
    known = Answer(Status.FEASIBLE, poor, bound=0.01, bound_class="some class")
    better = best_of_class(problem, known)
    assert better.schedule is not None
    assert not legality.check(program, better.schedule, problem.above_budget_bytes)
    assert overhead_of(program, better.schedule) < overhead_of(program, poor)
    assert better.notes["finalist"] in FINALISTS
    assert (better.bound, better.bound_class, better.status) == (0.01, "some class", Status.FEASIBLE)
    met = best_of_class(problem, replace(known, bound=overhead_of(program, better.schedule)))
    assert met.status is Status.OPTIMAL
    assert best_of_class(problem, better) == better, "nothing is better than the best"


def test_a_better_plan_that_moves_is_taken_where_buffers_may_move() -> None:
    program, card = layered(10), linked(1.0)
    problem = Problem(program, unplanned_bytes(program) - 3 * SIZE, machine=card, tiers=("host",), effort=10)
    poor = planner_named("libra")(problem)
    assert poor.schedule is not None
    better = best_of_class(problem, poor)
    assert better.notes["finalist"] in MOVING
    assert better.schedule is not None
    assert overhead_of(program, better.schedule, card) < overhead_of(program, poor.schedule, card)
    for name in MOVING:
        theirs = planner_named(name)(problem).schedule
        assert theirs is None or overhead_of(program, theirs, card) >= overhead_of(program, better.schedule, card)


@pytest.mark.parametrize("seed", [0, 5])
def test_auto_is_not_worse_than_published_planners_that_move(seed: int) -> None:
    """Of sixty seeds the two with which ``auto`` was, before it asked them."""
    program, rng = program_of(seed), random.Random(seed + 1000)
    links = random_links(rng, seconds=3e-3, size=6)
    card = replace(linked(1.0), links=links)
    smallest, _ = smallest_of(program, links=links)
    budget = int(smallest + rng.uniform(0.05, 0.9) * (unplanned_bytes(program) - smallest))
    problem = Problem(program, budget, machine=card, tiers=tuple(links), effort=EFFORT)
    ours = planner_named("auto")(problem).schedule
    assert ours is not None
    for name in MOVING:
        theirs = planner_named(name)(problem).schedule
        assert theirs is None or overhead_of(program, theirs, card) >= overhead_of(program, ours, card) - TOLERANCE


def test_finalists_are_asked_only_where_something_may_be_gained() -> None:
    told: list[str] = []
    program = chain(4)
    answer = Answer(Status.OPTIMAL, smallest_schedule(program, effort=10)[1], bound=0.0)
    problem = Problem(program, unplanned_bytes(program), effort=1, progress=lambda each: told.append(each.stage))
    assert best_of_class(problem, answer) is answer
    large = chain(MOST_OPS // 4 + 2)
    assert len(large.ops) > MOST_OPS
    open_answer = replace(answer, status=Status.FEASIBLE)
    assert best_of_class(replace(problem, program=large), open_answer) is open_answer
    stopped = Interrupt()
    stopped.set()
    assert best_of_class(replace(problem, interrupt=stopped), open_answer) is open_answer
    assert not told
    assert best_of_class(replace(problem, progress=silent), replace(open_answer, schedule=None)).schedule is not None


def test_every_finalist_is_a_planner_of_captured_order() -> None:
    assert set(FINALISTS) <= set(planner_names()) - OTHER_CLASS - EXACT - CHILD

"""Small programs solved whole: below every legal schedule, at the optimum where few cuts are far from it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ebbtide.planners import Interrupt, Problem, planner_named
from ebbtide.planners.hybrid.bounds import ORDERED_OPS, lane_bounds
from ebbtide.planners.hybrid.cut_lanes import GAP, PRICE
from ebbtide.planners.hybrid.floor import floor_with_tiers
from ebbtide.planners.hybrid.whole_lanes import HORIZON, WholeModel
from ebbtide.step.machine import Link, Machine
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Offload, Reload, Schedule
from ebbtide.step.simulate import overhead_of, simulate
from ebbtide.step.unplanned import unplanned_bytes
from oracle.with_moves import TooManyStates, optimal_with_moves
from random_moves import random_links, random_moves
from strategies import examples, programs

TOLERANCE = 1e-8
LOST = (GAP + PRICE) / 100 + 1e-7  # of the bound, to what the solver may leave open


COPIED = Program(
    "copied before the boundary, and loaded behind it",
    tuple(Op(f"op{i}", "test", (1,) if i == 4 else (), (i,), seconds=0.001) for i in range(5)),
    tuple(Buffer(f"b{i}", 2 if i == 1 else 0, i) for i in range(5)),
    4,
    (),
    (),
    between_bytes=12,
)


def machine(links: Mapping[str, Link]) -> Machine:
    return Machine("test", "cpu", 0, {"float32": 1.0}, 1.0, 0.0, 1, dict(links))


def solved(program: Program, budget: int, links: Mapping[str, Link], *, ordered: bool = True) -> tuple[float, bool]:
    answer = WholeModel(program, budget, links, ordered=ordered).solve(Interrupt(), 10**6, math.inf)
    return answer.bound, answer.infeasible


def last_bound(program: Program, budget: int, links: Mapping[str, Link]) -> float:
    return max((each.bound for each in lane_bounds(program, budget, links, Interrupt())), default=0.0)


@settings(max_examples=examples(40))
@given(program=programs(max_ops=ORDERED_OPS), seed=st.integers(0, 10**6))
def test_no_random_schedule_is_below_it(program: Program, seed: int) -> None:
    links = random_links(random.Random(seed))
    schedule = random_moves(program, links, seed)
    peak = simulate(program, schedule, machine(links)).above_bytes
    bound, infeasible = solved(program, peak, links, ordered=seed % 3 > 0)
    assert not infeasible
    assert bound <= overhead_of(program, schedule, machine(links)) + TOLERANCE


@settings(max_examples=examples(20))
@example(program=COPIED, seed=3, share=0.0)
@given(program=programs(max_ops=5), seed=st.integers(0, 10**6), share=st.floats(0.0, 1.0))
def test_the_last_bound_is_the_optimum_or_near(program: Program, seed: int, share: float) -> None:
    links = random_links(random.Random(seed), seconds=program.seconds / len(program.ops))
    floor, peak = floor_with_tiers(program, links)[0], unplanned_bytes(program)
    budget = int(floor + share * max(peak - floor, 0))
    try:
        exact = optimal_with_moves(program, budget, links, most_nodes=2_000)
    except TooManyStates:
        return
    if exact is not None and exact[0] < HORIZON / 100 - 1.0:
        bound = last_bound(program, budget, links)
        assert exact[0] - 0.02 - taken(program, exact[1], links) <= bound <= exact[0] + TOLERANCE


def taken(program: Program, schedule: Schedule, links: Mapping[str, Link]) -> float:
    """What the transfers of ``schedule`` take from computing: in a span the model counts that or waits, not both."""
    seconds, tiers = 0.0, dict[int, str]()
    for each in schedule.actions:
        if isinstance(each, Offload):
            tiers[each.buffer] = each.tier
        if isinstance(each, Offload | Reload):
            link = links[tiers[each.buffer]]
            way: Literal["out", "in"] = "out" if isinstance(each, Offload) else "in"
            seconds += link.compute_share * link.seconds(program.buffers[each.buffer].bytes, way)
    return seconds / program.seconds if seconds else 0.0


def forced() -> Program:
    """Op 3 reads what ops 1 and 2 made, and each of these runs at the full budget if the other's result is there."""
    made = ((5, 0), (8, 0), (6, 1), (1, 2), (1, 3))
    buffers = tuple(Buffer(f"b{b}", size, op) for b, (size, op) in enumerate(made))
    reads = ((), (0, 1), (0, 1), (2, 3))
    outputs = ((0, 1), (2,), (3,), (4,))
    seconds = (2.0, 1.0, 5.0, 1.0)
    ops = tuple(Op(f"op{i}", "test", reads[i], outputs[i], seconds=seconds[i]) for i in range(4))
    return Program("forced", ops, buffers, 1, gradients=(4,))


def test_bytes_of_reruns_are_counted() -> None:
    """No rerun fits, so that the only way is a slow one: a copy, for which all wait, and the way back."""
    links = {"host": Link("host", 100, 0.25, 0.5, least_bytes=4)}
    exact = optimal_with_moves(forced(), 19, links)
    assert exact is not None
    assert exact[0] > 3.0
    assert solved(forced(), 19, links) == (pytest.approx(exact[0], abs=LOST), False)
    few, infeasible = solved(forced(), 19, {})
    assert infeasible or few >= HORIZON / 100 - 1.0


def test_what_reads_a_changed_buffer_is_not_taken_for_a_rerun_after_the_boundary() -> None:
    """It would be the cheapest way, within the budget: the search for a bound ended at it."""
    made = ((0, 0), (7, 0), (5, 0), (6, 1), (1, 1), (8, 1), (0, 2))
    buffers = tuple(Buffer(f"b{b}", size, op) for b, (size, op) in enumerate(made))
    ops = (
        Op("op0", "test", (), (0, 1, 2), seconds=0.004, reads_mutated=True),
        Op("op1", "test", (), (3, 4, 5), seconds=0.001, rerunnable=False),
        Op("op2", "test", (0, 2, 5), (6,), seconds=0.003),
    )
    program = Program("late", ops, buffers, 2, gradients=(0, 4), mutations=(1, 3), between_bytes=12)
    links = {"host": Link("host", 12, 1660.0, 2037.0), "disk": Link("disk", 10**6, 745.0, 1780.0)}
    exact = optimal_with_moves(program, 22, links)
    assert exact is not None
    assert last_bound(program, 22, links) == pytest.approx(exact[0], abs=LOST)


def test_the_plan_of_a_small_program_is_proven() -> None:
    links = {"host": Link("host", 100, 0.25, 0.5, least_bytes=4)}
    answer = planner_named("auto")(Problem(forced(), 19, machine=machine(links), tiers=("host",)))
    assert answer.schedule is not None
    assert answer.bound == pytest.approx(overhead_of(forced(), answer.schedule, machine(links)), abs=LOST)

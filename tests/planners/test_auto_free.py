"""Free order: the bound against exhaustive search over all orders, plans against the rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.planners import Problem, Status, planner_named
from ebbtide.planners.base import FREE_ORDER
from ebbtide.planners.reductions.reorder import reorder
from ebbtide.planners.search.orders import FreeOrder, precedences
from ebbtide.step import legality
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from oracle.brute_force import optimal_overhead
from strategies import examples, programs


def overhead_of(program: Program, schedule: Schedule) -> float:
    return simulate(program, schedule).seconds / program.seconds - 1.0


def unplanned_bytes(program: Program) -> int:
    return simulate(program, unplanned_schedule(program)).above_bytes


def legal_orders(program: Program) -> Iterator[list[int | None]]:
    """Every order of first runs that the legality checker has nothing against."""
    ops: list[int | None] = [*range(len(program.ops)), None]
    for order in itertools.permutations(ops):
        seen: set[int] = set()
        for op in order:
            readable = op is None or all(
                (program.buffers[b].producer or 0) in seen
                for b in program.ops[op].inputs
                if program.buffers[b].producer is not None
            )
            if not readable:
                break
            if op is not None:
                seen.add(op)
        else:
            if not legality.check(program, Schedule.from_computes(program, order)):
                yield list(order)


@settings(max_examples=examples(25))
@given(program=programs(max_ops=5), share=st.floats(0.2, 1.0))
def test_bound_and_plan_hold_against_every_order(program: Program, share: float) -> None:
    budget = int(share * unplanned_bytes(program))
    each = [optimal_overhead(reorder(program, order).program, budget) for order in legal_orders(program)]
    best = min((overhead for overhead in each if overhead is not None), default=None)
    answer = planner_named("auto_free")(Problem(program, budget, effort=100))
    if best is None:
        assert answer.schedule is None
        return
    assert answer.bound is None or answer.bound <= best + 1e-9
    if answer.schedule is not None:
        assert not legality.check(program, answer.schedule, budget)
        assert overhead_of(program, answer.schedule) >= best - 1e-9
        if answer.status is Status.OPTIMAL:
            assert overhead_of(program, answer.schedule) <= best + 1e-5


@settings(max_examples=examples(25))
@given(program=programs(max_ops=5))
def test_what_always_comes_first_does_in_every_legal_order(program: Program) -> None:
    orders = list(legal_orders(program))
    free = FreeOrder(program)
    pairs = set(precedences(program))
    ops = range(len(program.ops))
    place = [{op: index for index, op in enumerate(order)} for order in orders]
    for a, b in itertools.permutations(ops, 2):
        always = all(each[a] < each[b] for each in place)
        if free.before(a, b):
            assert always
        if (a, b) in pairs:
            assert free.before(a, b)
    for op in ops:
        assert not free.is_early(op) or all(each[op] < each[None] for each in place)
        assert not free.is_late(op) or all(each[op] > each[None] for each in place)


@settings(max_examples=examples(50))
@given(program=programs(max_ops=12), share=st.floats(0.3, 1.0))
def test_is_legal_and_as_good_as_captured_order_where_that_is_proven(program: Program, share: float) -> None:
    problem = Problem(program, int(share * unplanned_bytes(program)), effort=100)
    captured, free = planner_named("auto")(problem), planner_named("auto_free")(problem)
    if free.schedule is None:
        assert captured.schedule is None
        return
    assert not legality.check(program, free.schedule, problem.above_budget_bytes)
    assert free.bound_class == FREE_ORDER or overhead_of(program, free.schedule) == 0.0
    if captured.bound is not None and free.bound is not None:
        assert free.bound <= overhead_of(program, free.schedule) + 1e-6


def test_another_order_needs_no_rerun() -> None:
    """Two large buffers that captured order makes one after the other; each could be used up first."""
    sizes = (10, 10, 1, 1, 1)
    reads = ((), (), (0,), (1,), (2, 3))
    ops = tuple(Op(f"o{i}", "t", inputs, (i,), seconds=1.0) for i, inputs in enumerate(reads))
    buffers = tuple(Buffer(f"b{i}", size, i) for i, size in enumerate(sizes))
    program = Program("p", ops, buffers, 5, forward_outputs=(4,))
    problem = Problem(program, 12)
    captured, free = planner_named("auto")(problem), planner_named("auto_free")(problem)
    assert captured.schedule is None or overhead_of(program, captured.schedule) > 0.0
    assert free.schedule is not None
    assert free.status is Status.OPTIMAL
    assert overhead_of(program, free.schedule) == 0.0

"""Annealed sequences keep the contract of planners, and find orders that need no rerun."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.planners import Interrupt, Problem, Status
from ebbtide.planners.search.greedy import greedy
from ebbtide.step import legality
from ebbtide.step.graph_file import program_from_graph
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide_published.planners.fastsa import GREEDY_SHARE, anneal
from oracle.brute_force import optimal_overhead
from strategies import chain, programs

GRAPHS = Path(__file__).parents[2].parent / "shared" / "data" / "graphs"


def overhead_of(program: Program, schedule: Schedule) -> float:
    return simulate(program, schedule).seconds / program.seconds - 1.0


def unplanned_bytes(program: Program) -> int:
    return simulate(program, unplanned_schedule(program)).above_bytes


@given(program=programs(max_ops=20), share=st.floats(0.0, 1.0))
def test_plans_are_legal_within_budget_and_not_worse_than_greedy(program: Program, share: float):
    problem = Problem(program, int(share * unplanned_bytes(program)), effort=50)
    answer = anneal(problem)
    quick = greedy(replace(problem, effort=round(50 * GREEDY_SHARE)))
    if answer.schedule is None:
        assert answer.status is Status.INFEASIBLE
        assert quick.schedule is None
        return
    assert not legality.check(program, answer.schedule, problem.above_budget_bytes)
    if quick.schedule is not None:
        assert overhead_of(program, answer.schedule) <= overhead_of(program, quick.schedule) + 1e-6


@given(program=programs(max_ops=6, max_tangents=1), share=st.floats(0.5, 1.0))
def test_free_order_is_at_least_as_good_as_the_optimum_in_captured_order(program: Program, share: float):
    budget = int(share * unplanned_bytes(program))
    best = optimal_overhead(program, budget)
    answer = anneal(Problem(program, budget, effort=100))
    if best is not None and answer.schedule is not None:
        assert overhead_of(program, answer.schedule) <= best + 1e-6


def two_branches() -> Program:
    """Two wide branches that captured order opens together; one after the other takes half the bytes."""
    sizes = (10, 10, 1, 1, 1)
    inputs = ((), (), (0,), (1,), (2, 3))
    ops = tuple(Op(f"op{k}", "test", reads, (k,), seconds=1.0) for k, reads in enumerate(inputs))
    buffers = tuple(Buffer(f"b{k}", size, k) for k, size in enumerate(sizes))
    return Program("branches", ops, buffers, 0, gradients=(4,))


def test_reordering_alone_can_do():
    program = two_branches()
    answer = anneal(Problem(program, 12, effort=20))
    assert answer.status is Status.OPTIMAL
    assert answer.schedule is not None
    assert overhead_of(program, answer.schedule) == 0.0
    assert unplanned_bytes(program) > 12


def test_plans_are_reproducible():
    program = chain(12)
    problem = Problem(program, int(0.4 * unplanned_bytes(program)), effort=200)
    assert anneal(problem) == anneal(problem)


def test_an_interrupt_keeps_the_best_so_far():
    program = chain(12)
    interrupt = Interrupt()

    def stop(progress) -> None:
        if progress.best_overhead is not None:
            interrupt.set()

    problem = Problem(program, int(0.5 * unplanned_bytes(program)), interrupt=interrupt, progress=stop)
    answer = anneal(problem)
    assert answer.status is Status.TIME_LIMIT
    assert answer.schedule is not None


@pytest.mark.skipif(not GRAPHS.is_dir(), reason="published graphs are absent")
@pytest.mark.parametrize(("share", "at_most"), [(0.9, 0.0), (0.8, 0.003)])
def test_random_layered_graph_matches_the_published_overhead(share: float, at_most: float):
    program = program_from_graph(json.loads((GRAPHS / "random_layered_n100.json").read_text()))
    answer = anneal(Problem(program, int(share * unplanned_bytes(program))))
    assert answer.schedule is not None
    assert overhead_of(program, answer.schedule) <= at_most + 5e-4

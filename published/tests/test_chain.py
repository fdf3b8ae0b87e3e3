"""The dynamic program is Revolve's optimum on equal steps; its plans keep the contract on any program."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.planners import Interrupt, Problem, Status, planner_named
from ebbtide.planners.auto import auto
from ebbtide.step import legality
from ebbtide.step.graph_file import program_from_graph
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide_published.planners.chain_table import NO_PLAN, Steps, Table
from ebbtide_published.planners.rotor import chain
from oracle.brute_force import optimal_overhead
from oracle.chains import mlp_chain
from strategies import chain as chain_program
from strategies import examples, programs

GRAPHS = Path(__file__).parents[2].parent / "shared" / "data" / "graphs"


def overhead_of(program: Program, schedule: Schedule) -> float:
    return simulate(program, schedule).seconds / program.seconds - 1.0


def unplanned_bytes(program: Program) -> int:
    return simulate(program, unplanned_schedule(program)).above_bytes


def equal_steps(count: int) -> Steps:
    """Steps of cost 1 and states of 1 byte that cannot keep their records, as Revolve has them."""
    nothing, one = np.zeros(count, np.int64), np.ones(count, np.int64)
    options = one[:, None]
    return Steps(one, nothing, nothing, nothing, one, (count + 1) * options, options, options, 0 * options)


def revolve_costs(most_steps: int) -> np.ndarray:
    """``t(l, s)``: the fewest steps run again to reverse ``l`` steps with ``s`` slots (Griewank & Walther 2000)."""
    again = np.full((most_steps + 1, most_steps + 1), np.inf)
    again[:2] = 0
    for slots in range(1, most_steps + 1):
        for steps in range(2, most_steps + 1):
            splits = np.arange(1, steps)
            again[steps, slots] = (splits + again[steps - splits, slots - 1] + again[splits, slots]).min()
    return again


@pytest.mark.parametrize("steps", [2, 3, 10, 25, 50, 100])
def test_equal_steps_cost_what_revolve_says_for_every_number_of_slots(steps: int):
    table = Table(equal_steps(steps), steps)
    expected = revolve_costs(steps)[steps]
    assert table.least(0) == NO_PLAN
    assert [table.least(slots) for slots in range(1, steps + 1)] == expected[1:].tolist()


@given(data=st.data())
def test_a_plan_of_the_table_costs_and_takes_what_the_table_says(data: st.DataObject):
    count, options, units = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 3)), 12

    def some(*shape: int, most: int = 4) -> np.ndarray:
        flat = data.draw(st.lists(st.integers(0, most), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        return np.array(flat, np.int64).reshape(shape)

    sizes = [some(count) for _ in range(5)]
    steps = Steps(*sizes, *(some(count, options) for _ in range(4)))
    table = Table(steps, units)
    costs = [table.least(memory) for memory in range(units + 1)]
    assert costs == sorted(costs, reverse=True)
    for memory in range(units + 1):
        if costs[memory] == NO_PLAN:
            continue
        held = table.held(memory)
        for reversing in range(count):
            taken = sum(
                int(steps.state[step] + (steps.keep[step, option] if option >= 0 else 0))
                for step, option, first, last in held
                if first <= reversing <= last and not step == first == last == reversing
            )
            assert taken <= memory


@settings(max_examples=examples(50))
@given(program=programs(max_ops=30), share=st.floats(0.0, 1.0))
def test_plans_are_legal_and_within_budget(program: Program, share: float):
    budget = int(share * unplanned_bytes(program))
    answer = chain(Problem(program, budget))
    if answer.schedule is None:
        assert answer.status is Status.INFEASIBLE
    else:
        assert not legality.check(program, answer.schedule, budget)


@given(program=programs(max_ops=6, max_tangents=1), share=st.floats(0.3, 1.0))
def test_no_plan_is_better_than_the_optimum(program: Program, share: float):
    budget = int(share * unplanned_bytes(program))
    answer = chain(Problem(program, budget))
    if answer.schedule is not None:
        best = optimal_overhead(program, budget)
        assert best is not None
        assert overhead_of(program, answer.schedule) >= best - 1e-9
        if answer.status is Status.OPTIMAL:
            assert overhead_of(program, answer.schedule) <= best + 2e-6


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3, 0.2, 0.15])
def test_a_chain_program_is_planned_at_least_as_well_as_by_revolve(share: float):
    program = chain_program(40)
    problem = Problem(program, int(share * unplanned_bytes(program)))
    ours, theirs = chain(problem).schedule, planner_named("revolve")(problem).schedule
    if theirs is not None:
        assert ours is not None
        assert overhead_of(program, ours) <= overhead_of(program, theirs) + 1e-9


@pytest.mark.parametrize("share", [0.7, 0.5, 0.3])
def test_values_that_the_backward_does_not_read_are_not_held(share: float):
    program = mlp_chain(24)
    problem = Problem(program, int(share * unplanned_bytes(program)))
    ours, best = chain(problem).schedule, auto(problem).schedule
    assert ours is not None
    assert best is not None
    assert 1.0 + overhead_of(program, ours) <= 1.05 * (1.0 + overhead_of(program, best))


def test_plans_are_reproducible():
    program = chain_program(16)
    problem = Problem(program, int(0.4 * unplanned_bytes(program)))
    assert chain(problem) == chain(problem)


def test_an_interrupt_ends_it():
    program = chain_program(16)
    interrupt = Interrupt()
    interrupt.set()
    answer = chain(Problem(program, int(0.5 * unplanned_bytes(program)), interrupt=interrupt))
    assert answer.status is Status.TIME_LIMIT
    assert answer.schedule is None


@pytest.mark.skipif(not GRAPHS.is_dir(), reason="published graphs are absent")
@pytest.mark.parametrize("name", ["unet_b32_train", "resnet50_b256_train", "mobilenet_b512_train"])
@pytest.mark.parametrize("share", [0.9, 0.8, 0.5])
def test_published_graphs_take_at_most_a_twentieth_more_time_than_auto(name: str, share: float):
    program = program_from_graph(json.loads((GRAPHS / f"{name}.json").read_text()))
    problem = Problem(program, int(share * unplanned_bytes(program)), effort=2000)
    ours, best = chain(problem).schedule, auto(problem).schedule
    assert ours is not None
    assert best is not None
    assert 1.0 + overhead_of(program, ours) <= 1.05 * (1.0 + overhead_of(program, best))

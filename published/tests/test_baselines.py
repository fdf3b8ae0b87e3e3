"""The baselines against the optimum of tiny programs, against published formulas, and on published graphs."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide import Program
from ebbtide.planners import Answer, Interrupt, Problem, Status, planner_named
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.planners.search.reruns_from_kept import reruns_for_residents
from ebbtide.step import legality
from ebbtide.step.graph_file import program_from_graph
from ebbtide.step.program import Buffer, Op
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide_published.planners.chen import sqrt_checkpoints
from ebbtide_published.planners.min_cut import CHEAP, HEAVY, Flow, saved_buffers
from ebbtide_published.planners.per_block import blocks_of
from ebbtide_published.planners.revolve import forward_steps_again, residents_with_slots
from ebbtide_published.planners.segments import articulation_points, residents_of_segments, segments_between, separators
from oracle.brute_force import optimal_overhead
from strategies import chain, examples, programs

CHEN = ["chen_sqrt", "chen_greedy", "ap_sqrt", "ap_greedy", "linearized_sqrt", "linearized_greedy"]
BASELINES = [*CHEN, "per_block", "min_cut", "echo", "revolve"]
GRAPHS = Path(__file__).parents[3] / "shared/data/graphs"


def unplanned_bytes(program: Program) -> int:
    return simulate(program, unplanned_schedule(program)).above_bytes


def overhead_of(program: Program, answer: Answer) -> float:
    assert answer.schedule is not None
    return simulate(program, answer.schedule).seconds / program.seconds - 1.0


def check(problem: Problem, answer: Answer) -> None:
    if answer.schedule is None:
        assert answer.status is Status.INFEASIBLE
    else:
        assert not legality.check(problem.program, answer.schedule, problem.above_budget_bytes)
        assert simulate(problem.program, answer.schedule).above_bytes <= problem.above_budget_bytes


# -- all of them ----------------------------------------------------------------------------------------------


@given(program=programs(max_ops=6, max_tangents=1), share=st.floats(0.0, 1.0))
def test_none_beats_the_optimum(program: Program, share: float):
    unplanned = unplanned_bytes(program)
    floor, _ = floor_bytes(program)
    budget = int(floor + share * (unplanned - floor))
    best = optimal_overhead(program, budget)
    for name in BASELINES:
        problem = Problem(program, budget)
        answer = planner_named(name)(problem)
        check(problem, answer)
        if answer.schedule is not None:
            assert best is not None
            assert overhead_of(program, answer) >= best - 1e-9
            if answer.status is Status.OPTIMAL:
                assert overhead_of(program, answer) <= best + 2e-6


@settings(max_examples=examples(50))
@given(program=programs(max_ops=30), share=st.floats(0.0, 1.0))
def test_plans_are_legal_and_within_budget(program: Program, share: float):
    for name in BASELINES:
        problem = Problem(program, int(share * unplanned_bytes(program)))
        check(problem, planner_named(name)(problem))


@pytest.mark.parametrize("name", BASELINES)
def test_a_budget_for_everything_needs_no_reruns(name: str):
    program = chain(6)
    answer = planner_named(name)(Problem(program, unplanned_bytes(program)))
    assert answer.status is Status.OPTIMAL
    assert answer.schedule == unplanned_schedule(program)


@pytest.mark.parametrize("name", BASELINES)
def test_each_is_reproducible_and_tells_its_setting(name: str):
    program = chain(16)
    stages: list[str] = []
    problem = Problem(program, int(0.7 * unplanned_bytes(program)), progress=lambda p: stages.append(p.stage))
    answer = planner_named(name)(problem)
    assert answer.status is Status.FEASIBLE, "on a chain each of them fits 70 % of the peak"
    assert answer == planner_named(name)(problem)
    assert answer.notes["setting"] in stages


@pytest.mark.parametrize("name", BASELINES)
def test_an_interrupt_ends_each(name: str):
    program = chain(16)
    interrupt = Interrupt()
    interrupt.set()
    answer = planner_named(name)(Problem(program, int(0.7 * unplanned_bytes(program)), interrupt=interrupt))
    assert answer.status is Status.TIME_LIMIT
    assert answer.schedule is None


@pytest.mark.parametrize("name", ["chen_greedy", "per_block", "revolve"])
def test_an_interrupt_keeps_the_best_so_far(name: str):
    program = chain(16)
    interrupt = Interrupt()
    problem = Problem(
        program,
        int(0.7 * unplanned_bytes(program)),
        interrupt=interrupt,
        progress=lambda p: interrupt.set() if p.best_overhead is not None else None,
    )
    answer = planner_named(name)(problem)
    assert answer.status is Status.TIME_LIMIT
    assert answer.schedule is not None


# -- where a forward may be cut ---------------------------------------------------------------------------------


@given(program=programs(max_ops=14))
def test_articulation_points_are_those_whose_removal_disconnects(program: Program):
    graph = networkx.Graph()
    graph.add_nodes_from(range(program.boundary))
    for index, op in enumerate(program.ops[: program.boundary]):
        graph.add_edges_from((index, program.buffers[b].producer) for b in op.inputs)
    pieces = networkx.number_connected_components(graph)
    expected: list[int] = []
    for op in range(program.boundary):
        rest = graph.copy()
        rest.remove_node(op)
        alone = graph.degree(op) == 0
        if networkx.number_connected_components(rest) > pieces - alone:
            expected.append(op)
    assert articulation_points(program) == expected


@given(program=programs(max_ops=14))
def test_separators_are_crossed_by_nothing_but_one_of_their_outputs(program: Program):
    expected: list[int] = []
    for index, op in enumerate(program.ops[: program.boundary]):
        read_later = {b for later in program.ops[index + 1 : program.boundary] for b in later.inputs}
        made = {b for earlier in program.ops[: index + 1] for b in earlier.outputs}
        crossing = made & read_later
        if len(crossing) <= 1 and crossing <= set(op.outputs):
            expected.append(index)
    assert separators(program) == expected


def test_every_op_of_a_chain_separates_and_its_inner_ones_are_articulation_points():
    program = chain(5)
    assert separators(program) == list(range(10))
    assert articulation_points(program) == list(range(1, 9))


@given(program=programs(max_ops=14), data=st.data())
def test_reruns_are_those_of_what_is_held_by_definition(program: Program, data: st.DataObject):
    number = st.integers(-1, 2)
    segment = data.draw(st.lists(number, min_size=program.boundary, max_size=program.boundary))
    boundary = program.boundary

    def held(t: int) -> set[int]:
        found: set[int] = set()
        for b, buffer in enumerate(program.buffers):
            o = buffer.producer
            if o is None:
                continue
            if o >= boundary or segment[o] < 0:
                found.add(b)
                continue
            with_it = {
                r
                for c, other in enumerate(program.buffers)
                if other.producer is not None and other.producer < boundary and segment[other.producer] == segment[o]
                for r in program.readers[c]
                if r >= boundary
            }
            read_from_here_on = any(t <= r < boundary for r in program.readers[b])
            if read_from_here_on or (with_it and t > min(with_it)):
                found.add(b)
        return found

    assert reruns_for_residents(program, residents_of_segments(program, segment)) == reruns_for_residents(program, held)


# -- chen -------------------------------------------------------------------------------------------------------


def test_sqrt_takes_every_so_many_candidates():
    assert sqrt_checkpoints(range(16)) == [3, 7, 11, 15]
    assert sqrt_checkpoints(range(22)) == [3, 7, 11, 15, 19]
    assert sqrt_checkpoints([5]) == [5]
    assert sqrt_checkpoints([]) == []


def test_sqrt_on_a_chain_makes_each_segment_again_once():
    program = chain(8)
    # Checkpoints after the gelus of layers 1, 3 and 5; what follows the last is kept.
    answer = planner_named("chen_sqrt")(Problem(program, unplanned_bytes(program) - 1))
    assert answer.schedule is not None
    runs = simulate(program, answer.schedule).runs
    assert [program.ops[o].name for o in range(len(runs)) if runs[o] > 1] == [
        *("linear0", "gelu0", "linear1"),
        *("linear2", "gelu2", "linear3"),
        *("linear4", "gelu4", "linear5"),
    ]
    assert max(runs) == 2
    assert overhead_of(program, answer) == pytest.approx(3 * 9e-3 / program.seconds)


def test_sqrt_takes_the_memory_of_about_two_times_the_root():
    # Chen et al., §4.1: checkpoints and one segment, each about sqrt(n) buffers, against n.
    for layers in (32, 128):
        program = chain(layers)
        segments = segments_between(program, sqrt_checkpoints(separators(program)))
        state = IntervalState(program)
        state.load(reruns_for_residents(program, residents_of_segments(program, segments)))
        ops = 2 * layers
        gradients = layers
        assert state.peak_bytes <= 8 * (2 * math.isqrt(ops) + 6) + gradients
        assert unplanned_bytes(program) >= 8 * ops


def test_greedy_is_never_dearer_than_sqrt_on_a_chain_of_equal_buffers():
    program = chain(18)
    for percent in range(40, 100, 10):
        problem = Problem(program, percent * unplanned_bytes(program) // 100)
        sqrt, greedy = (planner_named(f"chen_{kind}")(problem) for kind in ("sqrt", "greedy"))
        if sqrt.schedule is not None:
            assert overhead_of(program, greedy) <= overhead_of(program, sqrt) + 1e-9


# -- per block --------------------------------------------------------------------------------------------------


def with_modules(program: Program, path: str) -> Program:
    """The chain with its forward ops in modules; ``{}`` in ``path`` is the layer."""
    ops = [
        replace(op, module=path.format(index // 2)) if index < program.boundary else op
        for index, op in enumerate(program.ops)
    ]
    return replace(program, ops=tuple(ops))


@pytest.mark.parametrize("path", ["layers.{}.mlp", "net.0.blocks.{}", "{}"])
def test_blocks_are_the_outermost_modules_of_a_list_that_repeat(path: str):
    assert blocks_of(with_modules(chain(3), path)) == [0, 0, 1, 1, 2, 2]


def test_ops_between_blocks_belong_to_none_and_a_module_called_again_is_another_block():
    program = chain(3)
    modules = ["h.0.a", "h.0.b", "", "h.1", "h.1", "h.0.a"]
    ops = [replace(op, module=module) for op, module in zip(program.ops, modules, strict=False)]
    program = replace(program, ops=(*ops, *program.ops[len(ops) :]))
    assert blocks_of(program) == [0, 0, -1, 1, 1, 2]


def test_as_few_blocks_as_the_budget_needs_are_checkpointed():
    program = with_modules(chain(8), "layers.{}")
    unplanned = unplanned_bytes(program)
    # A block drops its linear (8 bytes); the gelu is read outside of it. Its rerun is one linear.
    for blocks in range(1, 7):
        answer = planner_named("per_block")(Problem(program, unplanned - 8 * blocks))
        assert answer.schedule is not None
        runs = simulate(program, answer.schedule).runs
        assert [program.ops[o].name for o in range(len(runs)) if runs[o] > 1] == [f"linear{k}" for k in range(blocks)]
        assert answer.notes["setting"] == f"{blocks} of 8 blocks"


# -- min cut ----------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_a_cut_is_minimal(data: st.DataObject):
    nodes = data.draw(st.integers(2, 9))
    node = st.integers(0, nodes - 1)
    edges = data.draw(st.lists(st.tuples(node, node, st.integers(0, 9)), max_size=25))
    flow, graph = Flow(nodes), networkx.DiGraph()
    graph.add_nodes_from(range(nodes))
    for tail, head, capacity in edges:
        flow.add(tail, head, capacity)
        known = graph.get_edge_data(tail, head, {"capacity": 0})["capacity"]
        graph.add_edge(tail, head, capacity=known + capacity)
    near = flow.source_side(0, nodes - 1)
    assert near[0]
    assert not near[-1]
    cut = sum(capacity for tail, head, capacity in edges if near[tail] and not near[head])
    assert cut == networkx.minimum_cut_value(graph, 0, nodes - 1)


@given(program=programs(max_ops=10), data=st.data())
def test_saved_buffers_cost_least_of_all_choices(program: Program, data: st.DataObject):
    forward = range(program.boundary)
    banned = data.draw(st.sets(st.sampled_from(forward))) if program.boundary else set[int]()
    readers = program.readers

    def reads_to_the_backward(b: int) -> float:
        after = (
            0 if r >= program.boundary else min(map(reads_to_the_backward, program.ops[r].outputs)) for r in readers[b]
        )
        return 1 + min(after, default=math.inf)

    def saved_if(again: set[int]) -> set[int]:
        return {
            b
            for o in forward
            if o not in again
            for b in program.ops[o].outputs
            if any(r >= program.boundary or r in again for r in readers[b])
        }

    def cost(saved: set[int] | frozenset[int]) -> int:
        size = program.buffers
        return sum(int(size[b].bytes * 1.1 ** min(reads_to_the_backward(b), 100)) for b in saved - program.pinned)

    free = [o for o in forward if o not in banned]
    choices = itertools.chain.from_iterable(itertools.combinations(free, k) for k in range(len(free) + 1))
    assert cost(saved_buffers(program, banned)) == min(cost(saved_if(set(again))) for again in choices)


def test_a_chain_saves_what_is_heavy_and_makes_the_rest_again():
    program = chain(6)
    answer = planner_named("min_cut")(Problem(program, unplanned_bytes(program) - 1))
    assert answer.schedule is not None
    runs = simulate(program, answer.schedule).runs
    # The last gelu is read by no op of the backward.
    assert [program.ops[o].name for o in range(len(runs)) if runs[o] > 1] == [f"gelu{k}" for k in range(5)]
    assert answer.notes["setting"] == "allowlist: 6 saved"


def test_names_are_those_of_the_installed_partitioner():
    from torch._functorch.partitioners import get_default_op_list

    def names(ops) -> set[str]:
        return {getattr(op, "_qualified_op_name", "::").rpartition("::")[2] for op in ops}

    lists = get_default_op_list()
    assert names(lists.compute_intensive_ops) >= HEAVY
    assert names(lists.recomputable_ops) >= CHEAP


# -- revolve ----------------------------------------------------------------------------------------------------


def uniform(steps: int) -> Program:
    """Steps of equal cost; each makes a state and a record, and its backward reads the record and the state before."""
    buffers: list[Buffer] = []
    ops: list[Op] = []

    def op(name: str, inputs: list[int], sizes: list[int]) -> tuple[int, ...]:
        made = tuple(range(len(buffers), len(buffers) + len(sizes)))
        buffers.extend(Buffer(f"{name}_{k}", size, len(ops)) for k, size in enumerate(sizes))
        ops.append(Op(name, name, tuple(sorted(inputs)), made, seconds=1.0))
        return made

    state: list[int] = []
    records: list[list[int]] = []
    for step in range(1, steps + 1):
        before = state
        made, record = op(f"step{step}", before, [4, 4])
        state = [made]
        records.append([*before, record])
    gradient = op("loss", state, [4])
    boundary = len(ops)
    for step in range(steps, 0, -1):
        gradient = op(f"reverse{step}", [*gradient, *records[step - 1]], [4])
    return Program("uniform", tuple(ops), tuple(buffers), boundary, gradients=gradient)


def test_steps_again_obey_the_recurrence():
    best: dict[tuple[int, int], int] = {}
    for steps, slots in itertools.product(range(1, 31), repeat=2):
        if steps == 1:
            best[steps, slots] = 0
        elif slots == 1:
            best[steps, slots] = steps * (steps - 1) // 2
        else:
            splits = range(1, steps)
            best[steps, slots] = min(m + best[steps - m, slots - 1] + best[m, slots] for m in splits)
        assert forward_steps_again(steps, slots) == best[steps, slots]
    # Griewank & Walther: with s slots and no step run more than r times again, C(s + r, s) steps are reversed.
    assert forward_steps_again(math.comb(3 + 3, 3), 3) == 3 * 20 - math.comb(6, 2)


@pytest.mark.parametrize("steps", range(2, 31))
def test_a_uniform_chain_reruns_as_often_as_published(steps: int):
    program = uniform(steps)
    for slots in range(1, steps):
        reruns = reruns_for_residents(program, residents_with_slots(program, slots))
        # The loss is the last step of the forward: nothing is read across its end, and it is never reversed.
        counted = Counter(program.ops[o].name for o, _ in reruns)
        assert set(counted) <= {f"step{k}" for k in range(1, steps + 1)}
        assert counted.total() == forward_steps_again(steps + 1, slots)


def test_the_most_slots_that_fit_are_taken():
    program = uniform(20)
    state = IntervalState(program)
    for slots in (2, 3, 5, 8):
        state.load(reruns_for_residents(program, residents_with_slots(program, slots)))
        answer = planner_named("revolve")(Problem(program, state.peak_bytes))
        assert answer.notes["setting"].startswith(f"{slots} slots")
        assert overhead_of(program, answer) == pytest.approx(state.overhead)


# -- published graphs -------------------------------------------------------------------------------------------


def graph(name: str) -> Program:
    path = GRAPHS / f"{name}.json"
    if not path.exists():
        pytest.skip("published graphs are not part of the repository")
    return program_from_graph(json.loads(path.read_text(encoding="utf-8")))


# Budgets in percent of the unplanned peak, and the optimum's overhead there (CP-SAT, proven), in percent.
@pytest.mark.parametrize(
    ("name", "percent", "optimum"),
    [("vgg16_b256_train", 85, 1.97), ("unet_b32_train", 80, 1.98), ("fcn8_b32_train", 80, 0.14)],
)
@pytest.mark.parametrize("planner", BASELINES)
def test_published_graphs(name: str, percent: int, optimum: float, planner: str):
    program = graph(name)
    problem = Problem(program, percent * unplanned_bytes(program) // 100)
    answer = planner_named(planner)(problem)
    check(problem, answer)
    if answer.schedule is not None:
        assert 100 * overhead_of(program, answer) >= optimum - 0.01


def test_each_fits_nine_tenths_of_fcn8():
    program = graph("fcn8_b32_train")
    problem = Problem(program, 90 * unplanned_bytes(program) // 100)
    assert all(planner_named(name)(problem).schedule is not None for name in BASELINES)

"""Echo's own decisions, its regions and groups against second computations, and its flagship on a captured model."""

from __future__ import annotations

from dataclasses import replace

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide import Program
from ebbtide._api.estimate import capture_ahead
from ebbtide.options import Options
from ebbtide.planners import Problem, Status, planner_named
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.planners.search.reruns_from_kept import reruns_for_residents
from ebbtide.step import legality
from ebbtide.step.program import Buffer, Op
from ebbtide.step.schedule import Boundary, Compute, Free, Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide_published.planners.arithmetic import aten_name
from ebbtide_published.planners.echo import charged, decided, residents_of, stash_bytes
from ebbtide_published.planners.echo_estimate import made_again
from ebbtide_published.planners.echo_policy import TABLE, Policy, policies
from ebbtide_published.planners.echo_regions import borders, regions
from ebbtide_published.zoo.nmt import nmt
from strategies import examples, programs

TARGETS = ("add.Tensor", "tanh.default", "mul.Tensor", "native_batch_norm.default", "mm.default", "cat.default")


class Joint:
    """A joint graph, written op by op."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.buffers: list[Buffer] = []
        self.index: dict[str, int] = {}
        self.boundary = 0

    def op(self, name: str, reads: str = "", size: int = 1) -> None:
        """An op, named as what it makes; its target is the name up to the first underscore or digit."""
        target = "".join(name.split("_")[0].rstrip("0123456789"))
        inputs = tuple(sorted({self.index[each] for each in reads.split()}))
        self.index[name] = len(self.buffers)
        self.buffers.append(Buffer(name, size, len(self.ops)))
        self.ops.append(Op(name, f"aten.{target}.default", inputs, (self.index[name],), seconds=1.0))

    def backward(self, size: int = 1) -> None:
        """The boundary, and the tangent of the loss."""
        self.boundary = len(self.ops)
        self.index["tangent"] = len(self.buffers)
        self.buffers.append(Buffer("tangent", size, None))

    def program(self, *gradients: str) -> Program:
        kept = tuple(self.index[name] for name in gradients)
        return Program("joint", tuple(self.ops), tuple(self.buffers), self.boundary, gradients=kept)


def names(program: Program, ops: frozenset[int] | set[int] | list[int]) -> set[str]:
    return {program.ops[op].name for op in ops}


def reruns(program: Program, cap: int | None = None) -> list[int]:
    return [op for op, _ in reruns_for_residents(program, residents_of(program, decided(program, cap)))]


# -- the decisions of Echo's own tests (MXNet, tests/python/unittest/test_memory_opt.py) --------------------------


def test_a_sum_of_two_layers_is_kept_and_its_tanh():
    """``test_rnn_cell``: two inputs would be kept in the place of one output."""
    joint = Joint()
    joint.op("mm_x", size=8)
    joint.op("mm_y", size=8)
    joint.op("add", "mm_x mm_y", 8)
    joint.op("tanh", "add", 8)
    joint.op("mm_z", "tanh", 8)
    joint.backward(8)
    joint.op("mm_weight", "tangent tanh")
    joint.op("mm_flow", "tangent", 8)
    joint.op("tanh_backward", "mm_flow tanh", 8)
    joint.op("mm_wx", "tanh_backward")
    joint.op("mm_wy", "tanh_backward")
    program = joint.program("mm_weight", "mm_wx", "mm_wy")
    assert decided(program) == frozenset()
    answer = planner_named("echo")(Problem(program, unplanned_bytes(program) - 1))
    assert answer.status is Status.INFEASIBLE


def attention(steps: int, keys: int = 40, query: int = 8) -> Program:
    """One matrix broadcast-added to a vector per step, tanh, and a product that scores it."""
    joint = Joint()
    joint.op("mm_keys", size=keys)
    for t in range(steps):
        joint.op(f"mm_query{t}", size=query)
        joint.op(f"add_{t}", f"mm_keys mm_query{t}", keys)
        joint.op(f"tanh_{t}", f"add_{t}", keys)
        joint.op(f"mm_score{t}", f"tanh_{t}", 1)
    joint.backward()
    for t in reversed(range(steps)):
        joint.op(f"mm_v{t}", f"tangent tanh_{t}")
        joint.op(f"mm_flow{t}", "tangent", keys)
        joint.op(f"tanh_backward{t}", f"mm_flow{t} tanh_{t}", keys)
        joint.op(f"sum_{t}", f"tanh_backward{t}", query)
    return joint.program(*(f"mm_v{t}" for t in range(steps)), *(f"sum_{t}" for t in range(steps)))


def test_a_matrix_added_to_many_vectors_is_added_again():
    """``test_mlp_attn``: the shared input is amortised. With one vector there is nothing to share."""
    program = attention(5)
    assert names(program, decided(program)) == {f"{op}_{t}" for op in ("add", "tanh") for t in range(5)}
    assert stash_bytes(program, decided(program)) == 40 + 5 * 8
    assert stash_bytes(program, ()) == 5 * 40
    assert decided(attention(1)) == frozenset()

    answer = planner_named("echo")(Problem(program, unplanned_bytes(program) - 1))
    assert answer.schedule is not None
    runs = simulate(program, answer.schedule).runs
    assert {op.name for op, times in zip(program.ops, runs, strict=True) if times == 2} == names(
        program, decided(program)
    )
    assert max(runs) == 2


@pytest.mark.parametrize("steps", range(1, 8))
def test_the_vectors_count_from_which_it_pays(steps: int):
    """``keys + steps * query`` bytes are released, ``steps * keys`` allocated."""
    assert bool(decided(attention(steps, 40, 24))) == (40 + steps * 24 < steps * 40)


def test_of_two_tanhs_before_a_layer_the_second_is_made_again_and_the_layer_is_not():
    """``test_fc``: the first is read by its own gradient; the layer's gradient reads the second, never the layer."""
    joint = Joint()
    joint.op("mm_x", size=8)
    joint.op("tanh_y", "mm_x", 8)
    joint.op("tanh_z", "tanh_y", 8)
    joint.op("mm_fc", "tanh_z", 8)
    joint.backward(8)
    joint.op("mm_weight", "tangent tanh_z", 2)
    joint.op("mm_flow", "tangent", 8)
    joint.op("tanh_backward1", "mm_flow tanh_z", 8)
    joint.op("tanh_backward2", "tanh_backward1 tanh_y", 8)
    program = joint.program("mm_weight", "tanh_backward2")
    assert names(program, decided(program)) == {"tanh_z"}
    assert names(program, reruns(program)) == {"tanh_z"}
    state = IntervalState(program)
    state.load(reruns_for_residents(program, residents_of(program, decided(program))))
    ran = [program.ops[a.op].name for a in state.to_schedule().actions if isinstance(a, Compute)]
    assert ran[:6] == ["mm_x", "tanh_y", "tanh_z", "mm_fc", "tanh_z", "mm_weight"]
    assert ran.count("mm_fc") == 1


# -- chains of states -------------------------------------------------------------------------------------------


def lstm(steps: int) -> Program:
    """An LSTM of one layer as cells: ``c' = f * c + i * g``, ``h = o * tanh(c')``; the gates are a product of ``h``."""
    joint = Joint()
    for t in range(steps):
        before = [f"mul_h{t - 1}", f"add_c{t - 1}"] if t else ["", ""]
        joint.op(f"mm_gates{t}", before[0], 4)
        for gate in "ifo":
            joint.op(f"sigmoid_{gate}{t}", f"mm_gates{t}", 1)
        joint.op(f"tanh_g{t}", f"mm_gates{t}", 1)
        joint.op(f"mul_fc{t}", f"sigmoid_f{t} {before[1]}", 1)
        joint.op(f"mul_ig{t}", f"sigmoid_i{t} tanh_g{t}", 1)
        joint.op(f"add_c{t}", f"mul_fc{t} mul_ig{t}", 1)
        joint.op(f"tanh_c{t}", f"add_c{t}", 1)
        joint.op(f"mul_h{t}", f"sigmoid_o{t} tanh_c{t}", 1)
    joint.op("mm_head", f"mul_h{steps - 1}", 1)
    joint.backward()
    weights = ["mm_whead"]
    joint.op("mm_whead", f"tangent mul_h{steps - 1}", 1)
    flow, later = "tangent", ""
    for t in reversed(range(steps)):
        before = [f"mul_h{t - 1}", f"add_c{t - 1}"] if t else ["", ""]
        joint.op(f"mul_do{t}", f"{flow} tanh_c{t}", 1)
        joint.op(f"tanh_backward_c{t}", f"{flow} sigmoid_o{t} tanh_c{t} {later}", 1)
        joint.op(f"mul_df{t}", f"tanh_backward_c{t} sigmoid_f{t} {before[1]}", 1)
        joint.op(f"mul_di{t}", f"tanh_backward_c{t} sigmoid_i{t} tanh_g{t}", 1)
        joint.op(f"cat_{t}", f"mul_do{t} mul_df{t} mul_di{t}", 4)
        joint.op(f"mm_w{t}", f"cat_{t} {before[0]}", 1)
        joint.op(f"mm_flow{t}", f"cat_{t}", 1)
        flow, later = f"mm_flow{t}", f"tanh_backward_c{t}"
        weights.append(f"mm_w{t}")
    return joint.program(*weights)


@pytest.mark.parametrize("cap", [0, 1, 2, 3, 5, None])
def test_cell_states_are_not_chased_back_further_than_the_cap(cap: int | None):
    program = lstm(13)
    again = names(program, decided(program, cap))
    kept = {t for t in range(13) if f"add_c{t}" not in again}
    assert kept == (set() if cap is None else {t for t in range(12) if t % (cap + 1) == cap})
    assert not any(name.startswith(("mm", "sigmoid")) for name in again), "gates take the bytes of their product"
    assert again.issuperset(f"{op}{t}" for op in ("tanh_c", "mul_h") for t in range(13))


def test_the_planner_doubles_the_cap_until_the_budget_is_met():
    program = lstm(13)
    state = IntervalState(program)
    peaks: list[int] = []
    for cap in (0, 1, 2, 4, 8):
        state.load(reruns_for_residents(program, residents_of(program, decided(program, cap))))
        peaks.append(state.peak_bytes)
    assert peaks[0] < unplanned_bytes(program)
    least = min(peaks)
    assert least < peaks[0], "chasing states saves something"
    first = 2 ** (peaks.index(least) - 1)
    answer = planner_named("echo")(Problem(program, least))
    assert answer.notes["setting"].startswith(f"states chased over {first} step")
    answer = planner_named("echo")(Problem(program, peaks[0]))
    assert answer.notes["setting"].startswith("states chased over 0 steps")


def steps_chased(program: Program, border: frozenset[int], policy: tuple[Policy, ...]) -> int:
    """The largest number of carrying steps on a way through cheap ops, by longest paths in a graph of them."""
    whole, cheap = networkx.DiGraph(), networkx.DiGraph()
    whole.add_nodes_from(range(program.boundary))
    for op in range(program.boundary):
        for b in program.ops[op].inputs:
            whole.add_edge(program.buffers[b].producer, op)

    def level(op: int) -> int:
        above = networkx.subgraph_view(whole, filter_node=lambda n: n in networkx.ancestors(whole, op) | {op})
        heavy = networkx.DiGraph()
        heavy.add_nodes_from(above)
        heavy.add_edges_from((u, v, {"weight": int(policy[v] is Policy.INPUTS)}) for u, v in above.edges)
        sources = [n for n in heavy if not heavy.in_degree(n)]
        heavy.add_edges_from((-1, n, {"weight": int(policy[n] is Policy.INPUTS)}) for n in sources)
        return networkx.dag_longest_path_length(heavy)

    levels = [level(op) for op in range(program.boundary)]
    cheap.add_edges_from(
        (u, v, {"weight": int(levels[v] > levels[u])}) for u, v in whole.edges if u not in border and v not in border
    )
    return networkx.dag_longest_path_length(cheap) if cheap else 0


@st.composite
def aten_programs(draw: st.DrawFn, max_ops: int = 14) -> Program:
    """Random programs whose ops have names of the table and others."""
    program = draw(programs(max_ops=max_ops))
    ops = tuple(replace(op, target=f"aten.{draw(st.sampled_from(TARGETS))}") for op in program.ops)
    return replace(program, ops=ops)


@settings(max_examples=examples(50))
@given(program=aten_programs(), cap=st.integers(0, 3))
def test_no_way_is_longer_than_the_cap(program: Program, cap: int):
    policy = policies(program)
    cut = borders(program, policy, cap)
    assert steps_chased(program, cut, policy) <= cap
    every = borders(program, policy, None)
    assert every == {op for op, each in enumerate(policy) if each is not Policy.BOTH}
    if steps_chased(program, every, policy) <= cap:
        assert cut == every, "what is short enough is not cut"


# -- regions and groups -----------------------------------------------------------------------------------------


def walked(program: Program, border: frozenset[int]) -> set[frozenset[int]]:
    """Regions by the walks of definition 2, from the forward's ends, as the authors' code takes them, step by step."""
    inside = range(program.boundary)
    forward_readers = [[r for r in each if r < program.boundary] for each in program.readers]
    ends = [o for o in inside if not any(forward_readers[b] for b in program.ops[o].outputs)]
    found: set[frozenset[int]] = set()
    done: set[int] = set()
    work = [*ends, *border]
    while work:
        item = work.pop()
        if item in done:
            continue
        region: set[int] = set()

        def back(heads: list[int], region: set[int] = region) -> None:
            while heads:
                op = heads.pop()
                region.add(op)
                for b in program.ops[op].inputs:
                    producer = program.buffers[b].producer
                    if producer is not None and producer not in border and producer not in region:
                        heads.append(producer)

        back([item])
        grown = True
        while grown:
            grown = False
            for op in sorted(region):
                met = (*program.ops[op].inputs, *(program.ops[op].outputs if op not in border else ()))
                for reader in {r for b in met for r in forward_readers[b]} - region:
                    heads, ahead = [], [reader]
                    while ahead:
                        head = ahead.pop()
                        behind = [r for b in program.ops[head].outputs for r in forward_readers[b]]
                        if head in border or not behind:
                            heads.append(head)
                        else:
                            ahead += behind
                    back(heads)
                    grown = True
        cheap = frozenset(region - border)
        done |= cheap
        if cheap:
            found.add(cheap)
    return found


@settings(max_examples=examples(100))
@given(program=aten_programs())
def test_regions_are_those_of_the_walks(program: Program):
    border = borders(program, policies(program), None)
    assert {frozenset(each) for each in regions(program, border)} == walked(program, border)


@settings(max_examples=examples(100))
@given(program=aten_programs())
def test_what_is_made_again_obeys_the_rule_of_bytes(program: Program):
    border = borders(program, policies(program), None)
    size = program.buffers

    def cost(buffers: set[int]) -> int:
        return sum(size[b].bytes for b in buffers if b not in program.pinned)

    def makers(op: int) -> set[int]:
        return {p for b in program.ops[op].inputs if (p := size[b].producer) is not None}

    for region in regions(program, border):
        kept: set[int] = set()
        while True:
            ready = {op for op in region if op not in kept and makers(op) <= kept | border}
            graph = networkx.Graph()
            graph.add_nodes_from(ready)
            graph.add_edges_from((op, f"buffer {b}") for op in ready for b in program.ops[op].inputs)
            pays: set[int] = set()
            for group in networkx.connected_components(graph):
                ops = {op for op in group if isinstance(op, int)}
                made = {b for op in ops for b in program.ops[op].outputs if program.readers[b]}
                read = {b for op in ops for b in program.ops[op].inputs}
                gone = {b for b in read if set(program.readers[b]) <= ready}
                if cost(gone) >= cost(made | (read - gone)):
                    pays |= ops
            if not pays:
                break
            kept |= pays
        assert made_again(program, border, region) == set(region) - kept


@settings(max_examples=examples(100))
@given(program=aten_programs(), cap=st.sampled_from([0, 1, None]))
def test_what_runs_again_is_what_is_charged(program: Program, cap: int | None):
    again = decided(program, cap)
    reran = reruns(program, cap)
    assert set(reran) == charged(program, again)
    assert len(reran) == len(set(reran)), "each once"
    policy = policies(program)
    assert all(policy[op] is Policy.BOTH for op in reran)
    assert not any(program.ops[op].random or not program.ops[op].rerunnable for op in reran)
    state = IntervalState(program)
    state.load(reruns_for_residents(program, residents_of(program, again)))
    assert stash_bytes(program, again) == crossing_bytes(program, state.to_schedule())


def crossing_bytes(program: Program, schedule: Schedule) -> int:
    """Bytes that are resident at the boundary and read before they are made again, or outputs."""
    resident: set[int] = set()
    at = schedule.actions.index(Boundary())
    for action in schedule.actions[:at]:
        match action:
            case Compute(op):
                resident.update(program.ops[op].outputs)
            case Free(b):
                resident.discard(b)
            case _:
                raise AssertionError(action)
    wanted = resident & program.pinned
    for action in schedule.actions[at:]:
        if isinstance(action, Compute):
            wanted.update(resident.intersection(program.ops[action.op].inputs))
            resident.difference_update(program.ops[action.op].outputs)
    return sum(program.buffers[b].bytes for b in wanted)


@settings(max_examples=examples(100))
@given(program=aten_programs(max_ops=30), share=st.floats(0.3, 1.0))
def test_answers_are_legal_and_within_budget(program: Program, share: float):
    budget = int(share * unplanned_bytes(program))
    answer = planner_named("echo")(Problem(program, budget))
    if answer.schedule is None:
        assert answer.status is Status.INFEASIBLE
    else:
        assert not legality.check(program, answer.schedule, budget)
        assert simulate(program, answer.schedule).above_bytes <= budget


# -- the table, and the flagship ----------------------------------------------------------------------------------


def test_names_of_the_table_are_ops_of_torch():
    assert {name for name in TABLE if not hasattr(torch.ops.aten, name)} == set()


@pytest.fixture(scope="module")
def translation() -> Program:
    """Additive attention in a Python loop of four steps; 8 sentences of 4 words, 32 wide."""
    case = nmt(8, vocabulary=40, length=4, width=32, dropout=0.0)
    return capture_ahead(case.model, case.args, case.kwargs, name="nmt", options=Options(machine="v100-16gb")).program


def test_attention_is_made_again_and_no_product_is(translation: Program):
    whole = 8 * 4 * 32 * 4  # bytes of one step's sum of keys and query
    steps = [
        op
        for op in translation.ops[: translation.boundary]
        if aten_name(op) == "tanh" and translation.buffers[op.outputs[0]].bytes == whole
    ]
    assert len(steps) == 4
    for cap in (0, None):
        reran = {translation.ops[op] for op in reruns(translation, cap)}
        assert reran.issuperset(steps)
        assert not {aten_name(op) for op in reran} & {"mm", "addmm", "bmm", "cat", "_softmax", "embedding"}
        saved = stash_bytes(translation, ()) - stash_bytes(translation, decided(translation, cap))
        assert saved >= (4 - 1) * whole, "four sums for the keys"


def test_auto_is_not_worse_at_the_same_peak(translation: Program):
    state = IntervalState(translation)
    state.load(reruns_for_residents(translation, residents_of(translation, decided(translation, 0))))
    answer = planner_named("auto")(Problem(translation, state.peak_bytes, effort=500))
    assert answer.schedule is not None
    assert simulate(translation, answer.schedule).seconds / translation.seconds - 1 <= state.overhead + 1e-9

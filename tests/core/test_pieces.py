"""Captured graphs stitched to one program: its bytes are those of the pieces run one after the other."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ebbtide.planners import Problem, planner_named
from ebbtide.planners.search.smallest import smallest_schedule
from ebbtide.planning.pieces import schedule_at_home
from ebbtide.step.legality import check
from ebbtide.step.pieces import Input, Occurrence, Output, Piece, Stitched, stitch
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from strategies import chain, examples, programs

EFFORT = 200


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    """A random program, some of its ops readers of an input, its outputs with its tangents."""
    program = replace(draw(programs(max_ops=8, held_bytes=(0,))), between_bytes=0)
    readers = draw(st.sets(st.integers(0, len(program.ops) - 1), max_size=3))
    gradients = [b for b in program.gradients if (program.buffers[b].producer or 0) >= program.boundary]
    gradient = draw(st.sampled_from([None, *gradients]))
    tangents = program.tangents
    program = replace(program, forward_outputs=program.forward_outputs[: max(len(tangents), 1)])
    given = zip_longest(program.forward_outputs, tangents)
    outputs = tuple(Output(-1 if made is None else made, tangent) for made, tangent in given)
    weights = tuple(dict.fromkeys(b for b in program.gradients if b != gradient))
    return Piece(program, (Input(tuple(sorted(readers)), gradient),), outputs, weights)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Occurrence, ...]:
    """One to four occurrences of at most two pieces, each fed by an earlier one or by nobody."""
    known = draw(st.lists(pieces(), min_size=1, max_size=2))
    found: list[Occurrence] = []
    for index in range(draw(st.integers(1, 4))):
        sources = [(i, k) for i in range(index) for k, each in enumerate(found[i].piece.outputs) if each.buffer >= 0]
        piece = draw(st.sampled_from(known))
        shared = tuple(f"weight{b}" for b in piece.weights) if draw(st.booleans()) else ()
        found.append(Occurrence(piece, (draw(st.sampled_from([None, *sources[-3:]])),), shared))
    return tuple(found)


@settings(max_examples=examples(60))
@given(program=programs())
def test_one_graph_is_a_step_of_one_occurrence(program: Program) -> None:
    assume(program.boundary < len(program.ops) or not program.tangents)
    outputs = [Output(b) for b in program.forward_outputs] + [Output(-1, t) for t in program.tangents]
    piece = Piece(program, (), tuple(outputs), tuple(dict.fromkeys(program.gradients)))
    stitched = stitch(program.name, [Occurrence(piece, ())])
    alone = replace(program, between_bytes=0, held_bytes=0)
    mine, theirs = (simulate(each, unplanned_schedule(each)) for each in (stitched.program, alone))
    assert len(stitched.program.ops) == len(program.ops)
    assert (mine.above_bytes, mine.seconds) == (theirs.above_bytes, theirs.seconds)


@settings(max_examples=examples(90))
@given(occurrences=steps(), share=st.floats(0.0, 1.0))
def test_a_plan_comes_home_within_its_budget_and_is_cut_back(occurrences: tuple[Occurrence, ...], share: float) -> None:
    stitched = stitch("step", occurrences)
    program = stitched.program
    smallest, least = smallest_schedule(program, effort=EFFORT)
    most = simulate(program, unplanned_schedule(program)).above_bytes
    budget = int(smallest + share * (most - smallest))

    def answer(limit: int) -> Schedule | None:
        return planner_named("auto")(Problem(program, limit, effort=EFFORT, seeds=(least,))).schedule

    schedule = schedule_at_home(stitched, budget, answer)
    if schedule is None:  # near the least there may be none that is at home
        assert budget < most
        return
    assert check(program, schedule, budget) == []
    home = schedule.computes
    assert stitched.at_home(home) == home
    assert_whole(stitched, home)
    for occurrence, own in zip(occurrences, stitched.cut(schedule), strict=True):
        assert check(occurrence.piece.program, own) == []


def assert_whole(stitched: Stitched, order: list[int | None]) -> None:
    """Each occurrence runs without another one's ops between its own, once before the boundary and once after it."""
    at = order.index(None)
    for half in (order[:at], order[at + 1 :]):
        owners = [stitched.owners[op][0] for op in half if op is not None]
        runs = [owner for place, owner in enumerate(owners) if not place or owners[place - 1] != owner]
        assert len(runs) == len(set(runs))


def test_pieces_of_a_chain_take_what_the_chain_takes() -> None:
    """Four pieces of three layers against one graph of twelve, kept and at the least memory."""
    whole, layers = chain(12), chain(3)
    last = layers.ops[layers.boundary - 1].outputs[0]
    readers = (0, [op.name for op in layers.ops].index("weight0"))
    flow = flowing(layers)
    entry = Input(readers, flow.gradients[-1])
    piece = Piece(flow, (entry,), (Output(last, flow.tangents[0]),), flow.gradients[:-1])
    follow = [Occurrence(piece, ((index, 0),)) for index in range(3)]
    step = stitch("chain", [Occurrence(piece, (None,)), *follow])
    assert len(step.program.ops) == len(whole.ops) + 1, "the first layer's flow is made as well"
    kept = [simulate(each, unplanned_schedule(each)).above_bytes for each in (whole, step.program)]
    assert abs(kept[1] - kept[0]) <= 2 * 8
    assert smallest_schedule(step.program, effort=EFFORT)[0] <= smallest_schedule(whole, effort=EFFORT)[0] + 4 * 8


def flowing(program: Program) -> Program:
    """A chain that also gives the gradient of what it is given."""
    names = [op.name for op in program.ops]
    at = program.ops[names.index("gelu_backward0")].outputs[0]
    buffers = (*program.buffers, Buffer("flow0", 8, len(program.ops)))
    ops = (*program.ops, Op("flow0", "flow0", (at,), (len(program.buffers),), seconds=4e-3))
    outputs = (program.ops[program.boundary - 1].outputs[0],)
    return replace(
        program, ops=ops, buffers=buffers, forward_outputs=outputs, gradients=(*program.gradients, len(program.buffers))
    )

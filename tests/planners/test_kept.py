"""The fewest reruns for what is kept."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.planners.search.reruns_from_kept import last_rerun_stage, reruns_for_residents
from ebbtide.step import legality
from ebbtide.step.program import Program
from strategies import chain, programs


def test_keeping_everything_reruns_nothing() -> None:
    program = chain(4)
    assert reruns_for_residents(program, lambda t: range(len(program.buffers))) == []


def test_what_is_dropped_over_the_boundary_runs_again_where_it_is_read() -> None:
    program = chain(4)
    linears = {op.outputs[0] for op in program.ops if op.name.startswith("linear")}
    everything = set(range(len(program.buffers)))
    reruns = reruns_for_residents(program, lambda t: everything - linears if t > program.boundary else everything)
    named = [(program.ops[o].name, program.ops[t].name) for o, t in reruns]
    # The op at the boundary itself still finds its linear; those after it do not, and need nothing but a gelu.
    assert named == [(f"linear{k}", f"gelu_backward{k}") for k in (2, 1, 0)]


@given(program=programs(max_ops=12), data=st.data())
def test_reruns_are_legal_and_the_fewest(program: Program, data: st.DataObject) -> None:
    stage = st.sets(st.sampled_from(range(len(program.buffers))))
    wishes = data.draw(st.lists(stage, min_size=len(program.ops), max_size=len(program.ops)))
    reruns = reruns_for_residents(program, lambda t: wishes[t])
    state = IntervalState(program)
    state.load(reruns)
    assert state.reruns == reruns, "one of them may not run where it stands"
    assert not legality.check(program, state.to_schedule())
    by_stage = {t: {o for o, _ in group} for t, group in itertools.groupby(reruns, key=lambda run: run[1])}
    for t, runs in by_stage.items():
        following = wishes[t + 1] if t + 1 < len(program.ops) else set[int]()
        wanted = {b for r in (*runs, t) for b in program.ops[r].inputs} | following
        for o in runs:
            assert t <= last_rerun_stage(program, o)
            assert set(program.ops[o].outputs) & (wanted - wishes[t] - program.pinned), "nobody would miss this rerun"

"""The interval state is the simulator, and undoing is exact."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.planners.search.interval_state import IntervalState, reruns_of
from ebbtide.step import legality
from ebbtide.step.program import Program
from ebbtide.step.schedule import Boundary, Compute
from ebbtide.step.simulate import simulate
from strategies import GIVEN_BACK, programs, reruns


def levels(state: IntervalState) -> list[int]:
    return [state.stage_bytes(t) for t in range(state.stages)]


@given(data=st.data())
def test_equals_the_simulator_after_every_change(data: st.DataObject):
    program: Program = data.draw(programs(held_bytes=GIVEN_BACK))
    state = IntervalState(program)
    for op, stage in data.draw(reruns(program)):
        if (op, stage) in state.reruns:
            assert state.remove(op, stage)
        else:
            state.add(op, stage)
        schedule = state.to_schedule()
        assert simulate(program, schedule).above_bytes == state.peak_bytes
        assert not legality.check(program, schedule, state.peak_bytes)
        assert reruns_of(program, schedule) == state.reruns
    assert state.all_stage_bytes().tolist() == levels(state)
    fresh = IntervalState(program)
    fresh.load(state.reruns)
    assert levels(fresh) == levels(state)
    assert fresh.overhead == state.overhead


@given(data=st.data())
def test_rollback_restores_everything(data: st.DataObject):
    program: Program = data.draw(programs(held_bytes=GIVEN_BACK))
    state = IntervalState(program)
    state.load(data.draw(reruns(program)))
    before = (state.reruns, levels(state), state.overhead)
    mark = state.mark()
    for op, stage in data.draw(reruns(program)):
        if (op, stage) in state.reruns:
            state.remove(op, stage)
        else:
            state.add(op, stage)
    state.rollback(mark)
    assert (state.reruns, levels(state), state.overhead) == before


@given(data=st.data())
def test_stage_bytes_are_the_peaks_between_first_runs(data: st.DataObject):
    program: Program = data.draw(programs(held_bytes=GIVEN_BACK))
    state = IntervalState(program)
    state.load(data.draw(reruns(program)))
    schedule = state.to_schedule()
    peaks = simulate(program, schedule).peak_bytes
    stage, most = 0, [0] * state.stages
    for index, action in enumerate(schedule.actions):
        if isinstance(action, Compute | Boundary):
            most[stage] = max(most[stage], int(peaks[index]))
            stage += action == Compute(stage)
    assert [max(value, 0) for value in levels(state)[:-1]] == most[:-1]

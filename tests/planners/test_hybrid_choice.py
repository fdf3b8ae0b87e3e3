"""Any choice of reruns, loads and holds gives a legal schedule, and can be read off it again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.planners.hybrid.choice import Choice, choice_of, schedule_of
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.step.legality import check
from ebbtide.step.program import Program
from ebbtide.step.schedule import Offload, Reload
from ebbtide.step.unplanned import unplanned_schedule
from strategies import programs, reruns


@st.composite
def choices(draw: st.DrawFn, program: Program) -> Choice:
    """Any reruns that may be, loads of movable buffers at any later stage, and holds."""
    state = IntervalState(program)
    state.load(draw(reruns(program)))
    later = [
        (b, t) for b in sorted(program.movable) for t in range((program.buffers[b].producer or 0) + 1, len(program.ops))
    ]
    some = st.sets(st.sampled_from(later), max_size=6) if later else st.just(set[tuple[int, int]]())
    loads = draw(some)
    tiers = {b: draw(st.sampled_from(["host", "disk"])) for b, _ in sorted(loads)}
    return Choice(frozenset(state.reruns), frozenset(loads), frozenset(draw(some)), tiers)


@given(data=st.data())
def test_every_choice_is_a_legal_schedule(data: st.DataObject):
    program: Program = data.draw(programs())
    choice = data.draw(choices(program))
    schedule = schedule_of(program, choice)
    assert not check(program, schedule)
    loaded = {each.buffer for each in schedule.actions if isinstance(each, Reload)}
    assert loaded == {each.buffer for each in schedule.actions if isinstance(each, Offload)}
    assert loaded <= {b for b, _ in choice.loads}
    again = choice_of(program, schedule)
    assert again is not None
    assert again.reruns == choice.reruns
    assert again.loads <= choice.loads
    assert schedule_of(program, again) == schedule_of(program, Choice(again.reruns, again.loads, tiers=again.tiers))


@given(program=programs())
def test_no_choice_is_the_unplanned_step(program: Program):
    assert schedule_of(program, Choice()) == unplanned_schedule(program)

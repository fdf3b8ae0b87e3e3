"""The interval state with loads and holds says what the simulator says, whatever is chosen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.planners.base import Interrupt
from ebbtide.planners.hybrid.choice import Choice, schedule_of
from ebbtide.planners.hybrid.floor import floor_with_tiers
from ebbtide.planners.hybrid.state import HybridState
from ebbtide.planners.search import local_search
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.step.legality import check
from ebbtide.step.machine import Link, Machine
from ebbtide.step.program import Program
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_bytes
from strategies import examples, programs, reruns


def _machine(draw: st.DrawFn) -> Machine:
    def link(tier: str, duplex: bool) -> Link:
        rate = st.sampled_from([10.0, 100.0, 1000.0])
        return Link(
            tier,
            draw(st.sampled_from([200, 10**6])),
            draw(rate),
            draw(rate),
            latency_seconds=draw(st.sampled_from([0.0, 0.3])),
            duplex=duplex,
            compute_share=draw(st.sampled_from([0.0, 0.1])),
            alignment_bytes=draw(st.sampled_from([1, 64])),
        )

    links = {"host": link("host", True), "disk": link("disk", False)}
    return Machine("toy", "cuda", 10**9, {"float32": 1.0}, 1.0, 0.0, 1, links=links)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Program, Machine, list[Choice]]:
    """A program, a machine with a duplex and a joint link, and a few choices, legal or not."""
    program = draw(programs())
    machine = _machine(draw)
    later = [
        (b, t) for b in sorted(program.movable) for t in range((program.buffers[b].producer or 0) + 1, len(program.ops))
    ]
    some = st.sets(st.sampled_from(later), max_size=8) if later else st.just(set[tuple[int, int]]())
    found: list[Choice] = []
    for _ in range(3):
        state = IntervalState(program)
        state.load(draw(reruns(program)))
        loads = draw(some)
        tiers = {b: draw(st.sampled_from(["host", "disk"])) for b, _ in sorted(loads)}
        found.append(Choice(frozenset(state.reruns), frozenset(loads), frozenset(draw(some)), tiers))
    return program, machine, found


def _hold_against_the_simulator(state: HybridState, machine: Machine) -> None:
    program = state.program
    choice = state.choice
    schedule = schedule_of(program, choice)
    timeline = simulate(program, schedule, machine)
    assert not check(program, schedule, state.peak_bytes, machine.links)
    assert timeline.above_bytes == state.peak_bytes
    assert state.seconds == pytest.approx(timeline.seconds, rel=1e-6)


@settings(max_examples=examples(60))
@given(situation=situations())
def test_bytes_and_makespan_are_the_simulators(situation: tuple[Program, Machine, list[Choice]]):
    program, machine, choices = situation
    state = HybridState(program, machine.links)
    for choice in choices:  # the state goes from one to the next
        state.load_choice(choice)
        _hold_against_the_simulator(state, machine)


@settings(max_examples=examples(30))
@given(situation=situations(), share=st.sampled_from([0.3, 0.6, 0.9]), moves_only=st.booleans())
def test_searches_keep_to_the_simulator(
    situation: tuple[Program, Machine, list[Choice]], share: float, moves_only: bool
):
    program, machine, choices = situation
    state = HybridState(program, machine.links)
    floor, _ = floor_with_tiers(program, machine.links)
    budget = int(floor + share * (unplanned_bytes(program) - floor))
    for choice in (Choice(), choices[0]):
        state.load_choice(choice)
        local_search.repair(state, budget, Interrupt(), moves_only=moves_only)
        _hold_against_the_simulator(state, machine)
        if state.peak_bytes > budget:
            continue
        local_search.tighten(state, budget)
        local_search.clean_up(state, budget)
        tight = state.overhead
        local_search.anneal(state, budget, 20, 1, Interrupt(), moves_only=moves_only)
        _hold_against_the_simulator(state, machine)
        assert state.peak_bytes <= budget
        assert state.overhead <= tight


@settings(max_examples=examples(40))
@given(situation=situations())
def test_what_is_undone_leaves_nothing(situation: tuple[Program, Machine, list[Choice]]):
    program, machine, (choice, other, _) = situation
    state = HybridState(program, machine.links)
    state.load_choice(choice)
    before = state.choice, state.peak_bytes, state.seconds, state.all_stage_bytes().tolist()
    mark = state.mark()
    for op, stage in sorted(other.reruns):
        state.add(op, stage)
    for b, stage in sorted(other.loads):
        state.add_load(b, stage)
    for b, stage in sorted(choice.loads & state.choice.loads):
        state.remove_load(b, stage)
    for b, stage in sorted(other.holds):
        state.hold(b, stage)
    assert state.seconds > 0
    state.rollback(mark)
    assert (state.choice, state.peak_bytes, state.seconds, state.all_stage_bytes().tolist()) == before

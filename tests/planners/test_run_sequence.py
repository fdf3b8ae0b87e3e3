"""Sequences of runs in free order: bytes and overhead are the simulator's after any move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.planners.search import sequence as Q
from ebbtide.planners.search.layout import H_RANDOM
from ebbtide.planners.search.run_sequence import RunSequence
from ebbtide.step import legality
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import overhead_of, simulate
from ebbtide.step.unplanned import unplanned_bytes, unplanned_schedule
from strategies import GIVEN_BACK, programs


def agrees(program: Program, sequence: RunSequence) -> None:
    schedule = Schedule.from_computes(program, sequence.order())
    assert not legality.check(program, schedule)
    assert simulate(program, schedule).above_bytes == sequence.peak_bytes
    assert overhead_of(program, schedule) == pytest.approx(sequence.overhead, abs=1e-6)


@given(program=programs(max_ops=14, held_bytes=GIVEN_BACK), seed=st.integers(1, 1 << 30), moves=st.integers(1, 25))
def test_equals_the_simulator_after_any_move(program: Program, seed: int, moves: int):
    sequence = RunSequence(program, 1 << 40)
    sequence.load(unplanned_schedule(program).computes)
    agrees(program, sequence)
    sequence.memory[H_RANDOM] = seed * 2 + 1
    for k in range(1, moves):  # so hot that every move is kept
        Q.anneal_runs(sequence.memory, k, k + 1, 1 << 40, 1e9, 1e9, 1.0)
        agrees(program, sequence)
    order, peak = sequence.order(), sequence.peak_bytes
    Q.spread(sequence.memory)
    assert (sequence.order(), sequence.peak_bytes) == (order, peak)


@given(program=programs(max_ops=14, held_bytes=GIVEN_BACK), seed=st.integers(1, 1 << 30), share=st.floats(0.3, 1.0))
def test_moves_are_taken_back_exactly(program: Program, seed: int, share: float):
    sequence = RunSequence(program, int(share * unplanned_bytes(program)))
    sequence.load(unplanned_schedule(program).computes)
    sequence.memory[H_RANDOM] = seed * 2 + 1
    Q.anneal_runs(sequence.memory, 1, 300, 300, 0.1, 1e-4, 1.0)
    agrees(program, sequence)
    if sequence.best_overhead < float("inf"):
        assert sequence.load(sequence.best_order())
        agrees(program, sequence)
        assert sequence.overhead == sequence.best_overhead

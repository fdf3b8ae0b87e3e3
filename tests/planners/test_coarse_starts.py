"""Start points from coarsenings: plans of layers as single ops, brought down to the program."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.planners import Problem
from ebbtide.planners.reductions.coarse_starts import FEWEST, MOST, coarse_starts, coarsenings
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.step.legality import check
from ebbtide.step.program import Program
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from strategies import chain


@pytest.fixture
def program() -> Program:
    """A chain whose ops are named in threes."""
    plain = chain(24)
    ops = tuple(replace(op, module=f"block{k // 3}.step{k}") for k, op in enumerate(plain.ops))
    return replace(plain, ops=ops)


def test_coarsenings_are_coarser_and_lie_in_the_range(program: Program) -> None:
    found = coarsenings(Problem(program, 1))
    assert found
    counts = [len(each.program.ops) for each in found]
    assert counts == sorted(counts)
    assert all(FEWEST * len(program.ops) <= count <= MOST * len(program.ops) for count in counts)


def test_a_program_without_names_has_no_coarsenings() -> None:
    assert coarsenings(Problem(chain(24), 1)) == []


def test_starts_are_legal_and_fit(program: Program) -> None:
    budget = int(0.6 * simulate(program, unplanned_schedule(program)).above_bytes)
    starts = list(coarse_starts(Problem(program, budget, effort=400), 200))
    assert starts
    for reruns in starts:
        state = IntervalState(program)
        state.load(reruns)
        assert state.reruns == sorted(reruns, key=lambda run: (run[1], run[0]))
        assert not check(program, state.to_schedule(), budget)

"""The exact model as a start point: the optimum of small programs, nothing lost where it is too large or cut short."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.planners import Problem
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.search.exact import LEAST_ROWS, OPS, start_from_model
from ebbtide.planners.search.greedy import Incumbent, start_from
from ebbtide.step.program import Program
from ebbtide.step.unplanned import unplanned_bytes
from oracle.brute_force import optimal_overhead
from strategies import chain, examples, programs

TOLERANCE = 3e-6
ENOUGH = 1_000 * LEAST_ROWS


@settings(max_examples=examples(60))
@given(program=programs(max_ops=8), share=st.floats(0.0, 1.0))
def test_small_programs_get_the_optimum(program: Program, share: float) -> None:
    floor, _ = floor_bytes(program)
    budget = int(floor + share * (unplanned_bytes(program) - floor))
    if budget >= unplanned_bytes(program):
        return  # nothing to choose: a model without columns
    found = Incumbent(Problem(program, budget))
    start_from_model(found, ENOUGH)
    best = optimal_overhead(program, budget, ascending=True)
    if best is None:
        assert found.reruns is None
    else:
        assert found.overhead <= best + TOLERANCE


@pytest.mark.parametrize(("length", "work"), [(8, 0), (8, LEAST_ROWS), (OPS, ENOUGH)])
def test_what_was_known_is_kept(length: int, work: int) -> None:
    program = chain(length)
    found = Incumbent(Problem(program, unplanned_bytes(program) // 2))
    assert start_from(found, [])
    before = found.overhead
    start_from_model(found, work)
    assert found.overhead <= before

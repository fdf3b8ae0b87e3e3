"""Merged spans of the cut relaxation: nothing new in whole numbers, a bound at least as high in the linear one."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ebbtide._api.estimate import capture_ahead
from ebbtide.options import Options
from ebbtide.planners import Interrupt
from ebbtide.planners.bounds.cut_bound import CutModel, quick_bound
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.planners.search.orders import CapturedOrder, FreeOrder
from ebbtide.step.program import Program
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide.zoo import GPTConfig, gpt
from strategies import examples, programs

TOLERANCE = 1e-5  # HiGHS' gap; bounds are shares of the step
PLENTY = 10**12  # of work


def solved(model: CutModel, *, whole: bool) -> tuple[float, bool]:
    answer = model.solve(Interrupt(), PLENTY, math.inf, whole=whole)
    return answer.bound, answer.infeasible


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(program=programs(max_ops=16), share=st.floats(0.3, 0.95), free=st.booleans(), data=st.data())
def test_merged_spans_keep_the_whole_optimum_and_lift_the_linear_bound(
    program: Program, share: float, free: bool, data: st.DataObject
) -> None:
    budget = int(share * simulate(program, unplanned_schedule(program)).above_bytes)
    order = FreeOrder(program) if free else CapturedOrder(program)
    count = len(program.ops)
    assume(count >= 2)
    cuts = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=min(4, count))))
    assume(all(order.comparable(a, b) for a, b in itertools.pairwise(cuts)))
    plain, merged = (CutModel(program, budget, cuts, order) for _ in range(2))
    assume(not plain.hopeless)
    merged.merge()
    assert merged.model.rows >= plain.model.rows
    whole, infeasible = solved(plain, whole=True)
    whole_merged, infeasible_merged = solved(merged, whole=True)
    assert infeasible_merged == infeasible
    assert infeasible or abs(whole_merged - whole) <= TOLERANCE * (1.0 + whole)
    linear, _ = solved(plain, whole=False)
    linear_merged, none_linear = solved(merged, whole=False)
    assert none_linear or linear_merged >= linear - TOLERANCE
    assert infeasible or linear_merged <= whole + TOLERANCE


@pytest.mark.slow
def test_more_cuts_lower_the_linear_bound_of_a_transformer_only_where_spans_are_not_merged() -> None:
    case = gpt(8, GPTConfig(vocabulary=2048, length=128, layers=4, width=64, heads=4, dropout=0.1))
    program = capture_ahead(
        case.model, case.args, case.kwargs, name="gpt", options=Options(machine="v100-16gb")
    ).program
    budget = int(1.05 * floor_bytes(program)[0])
    state = IntervalState(program)
    worst = max(range(len(program.ops)), key=lambda t: (state.stage_bytes(t), -t))
    third = (len(program.ops) - 1 - worst) // 3
    cuts = [worst, worst + third, worst + 2 * third]
    one = quick_bound(program, budget, Interrupt(), state).bound
    plain, merged = (CutModel(program, budget, cuts, CapturedOrder(program)) for _ in range(2))
    merged.merge()
    assert solved(plain, whole=False)[0] < 0.95 * one
    assert solved(merged, whole=False)[0] >= one - TOLERANCE

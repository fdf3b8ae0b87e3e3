"""Plans for shapes that were not searched for: judged on their own program, close to a proven bound, or not given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import BudgetError
from ebbtide.planners import Interrupt, Problem, Status
from ebbtide.planners.bounds.cut_bound import cut_bound, quick_bound
from ebbtide.planners.reductions.adapt import adapted_to
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.planning import one_program as planning
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.planning.shape_plans import WASTE, Buckets
from ebbtide.report.plan import Plan
from ebbtide.step.legality import check
from ebbtide.step.program import Program
from ebbtide.step.provenance import Planned
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide.units import Budget
from strategies import chain, programs

EFFORT = 4_000
PROGRAM = chain(24)


def longer(program: Program, factor: float, spread: float = 0.0) -> Program:
    """Activations ``factor`` times as large, gradients as they are; every other one by ``spread`` more."""
    fixed = program.pinned
    buffers = tuple(
        replace(each, bytes=each.bytes if b in fixed else round(each.bytes * (factor + spread * (b % 2))))
        for b, each in enumerate(program.buffers)
    )
    return replace(program, buffers=buffers)


def unplanned_bytes(program: Program) -> int:
    return simulate(program, unplanned_schedule(program)).above_bytes


def planned(buckets: Buckets, program: Program, budget: int, planner: str = "auto") -> Plan:
    options = PlanningOptions(planner=planner, effort=EFFORT, buckets=buckets)
    plan = make_plan(program, Budget(bytes=budget), resident_bytes=0, options=options)
    # Whatever it comes from, it is a plan of this very program.
    assert check(program, plan.schedule, budget) == []
    assert simulate(program, plan.schedule).above_bytes <= budget
    return plan


def was_fitted(plan: Plan) -> bool:
    return plan.provenance.planned is Planned.ADAPTED


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry per search for a plan, and one per search for the smallest budget."""
    made: list[str] = []
    named, smallest = planning.planner_named, planning.smallest_of

    def counting(name: str) -> object:
        plan_with = named(name)

        def run(problem: Problem) -> object:
            made.append(name)
            return plan_with(problem)

        return run

    def looking(*args: object, **kwargs: object) -> object:
        made.append("smallest")
        return smallest(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "planner_named", counting)
    monkeypatch.setattr(planning, "smallest_of", looking)
    return made


def test_other_shapes_take_the_plan_of_the_first(searches: list[str]) -> None:
    buckets = Buckets()
    budget = unplanned_bytes(PROGRAM) // 2
    assert not was_fitted(planned(buckets, PROGRAM, budget))
    assert searches == ["auto", "smallest"]
    for factor in (0.9, 0.7, 1.1, 1.25):
        plan = planned(buckets, longer(PROGRAM, factor), budget)
        assert was_fitted(plan)
        assert plan.bound is not None
        assert plan.overhead > 0
        own = make_plan(
            longer(PROGRAM, factor), Budget(bytes=budget), resident_bytes=0, options=PlanningOptions(effort=EFFORT)
        )
        assert plan.overhead <= own.overhead + 2 * WASTE
    assert searches.count("auto") == 1 + 4, "the four that it was held against"


def test_what_fits_unplanned_is_not_searched_for(searches: list[str]) -> None:
    buckets = Buckets()
    planned(buckets, PROGRAM, unplanned_bytes(PROGRAM) // 2)
    short = longer(PROGRAM, 0.4)
    plan = planned(buckets, short, unplanned_bytes(short))
    assert plan.schedule == unplanned_schedule(short)
    assert plan.status is Status.OPTIMAL
    assert plan.smallest_bytes < plan.budget_bytes, "the least that is known of this structure, judged here"
    assert searches == ["auto", "smallest"]


def test_a_schedule_that_is_known_gives_the_smallest_budget() -> None:
    buckets = Buckets()
    budget = unplanned_bytes(PROGRAM) // 2
    planned(buckets, PROGRAM, budget)
    plan = planned(buckets, longer(PROGRAM, 0.9), budget)
    again = planned(Buckets(), longer(PROGRAM, 0.9), plan.smallest_bytes)
    assert again.predicted_peak_bytes <= plan.smallest_bytes


def test_one_shape_alone_is_always_searched_for(searches: list[str]) -> None:
    buckets = Buckets()
    budget = unplanned_bytes(PROGRAM)
    for share in (60, 55, 50):  # what is resident has grown
        assert not was_fitted(planned(buckets, PROGRAM, budget * share // 100))
    assert searches.count("auto") == 3


def test_another_structure_takes_nothing(searches: list[str]) -> None:
    buckets = Buckets()
    planned(buckets, PROGRAM, unplanned_bytes(PROGRAM) // 2)
    other = chain(23)
    assert not was_fitted(planned(buckets, other, unplanned_bytes(other) // 2))
    assert searches.count("auto") == 2


def test_another_planner_plans_every_shape_itself(searches: list[str]) -> None:
    buckets = Buckets()
    budget = unplanned_bytes(PROGRAM) // 2
    planned(buckets, PROGRAM, budget)
    assert not was_fitted(planned(buckets, longer(PROGRAM, 0.9), budget, "greedy"))
    assert searches[-1] == "greedy"


def test_what_is_not_close_to_the_bound_is_searched_for(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    buckets = Buckets()
    budget = unplanned_bytes(PROGRAM) // 2
    planned(buckets, PROGRAM, budget)
    monkeypatch.setattr("ebbtide.planning.shape_plans.WASTE", -1.0)  # nothing can be good enough
    before = len(buckets)
    plan = planned(buckets, longer(PROGRAM, 0.9, 0.1), budget)
    assert not was_fitted(plan)
    assert len(buckets) == before + 1, "it makes a bucket of its own"
    assert searches == ["auto", "smallest", "auto"], "the smallest is known already"


def test_where_a_quick_plan_will_do_a_less_good_one_is_fitted(
    searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets = Buckets()
    budget = unplanned_bytes(PROGRAM) // 2
    planned(buckets, PROGRAM, budget)
    monkeypatch.setattr("ebbtide.planning.shape_plans.WASTE", -0.02)  # nothing can be as good as a bucket's
    before, other = len(buckets), longer(PROGRAM, 0.9, 0.1)
    options = PlanningOptions(effort=EFFORT, buckets=buckets, quick=True)
    plan = make_plan(other, Budget(bytes=budget), resident_bytes=0, options=options)
    assert plan.provenance.planned is Planned.QUICKLY, "so that it is made better beside training"
    assert not plan.smallest_is_searched
    assert check(other, plan.schedule, budget) == []
    assert len(buckets) == before, "no other shape is held to it"
    assert searches == ["auto", "smallest"], "of the first shape"


def test_a_larger_shape_that_cannot_fit_is_refused_with_its_own_smallest_budget() -> None:
    buckets = Buckets()
    budget = unplanned_bytes(PROGRAM) // 2
    planned(buckets, PROGRAM, budget)
    huge = longer(PROGRAM, 9.0)
    with pytest.raises(BudgetError) as caught:
        planned(buckets, huge, budget)
    assert caught.value.budget_bytes < caught.value.floor_bytes <= caught.value.smallest_bytes
    planned(buckets, huge, caught.value.smallest_bytes)
    assert was_fitted(planned(buckets, longer(PROGRAM, 0.9), budget)), "and the others go on"


def test_buckets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.planning.shape_plans.MOST", 2)
    buckets = Buckets()
    for layers in (8, 9, 10, 11):
        program = chain(layers)
        planned(buckets, program, unplanned_bytes(program) * 7 // 10)
    assert len(buckets) == 2


@given(programs(max_ops=10), st.integers(1, 9), st.integers(0, 3), st.data())
def test_a_fitted_plan_is_legal_within_the_budget_and_no_better_than_the_bound(
    program: Program, eighths: int, spread: int, data: st.DataObject
) -> None:
    other = longer(program, eighths / 4, spread)
    budget = data.draw(st.integers(1, max(unplanned_bytes(other), 1)))
    seed = data.draw(st.sampled_from([unplanned_schedule(program), _tight(program)]))
    answer, _ = adapted_to(Problem(other, budget, effort=200, seeds=(seed,)), most_gap=10.0)
    if answer is None:
        return
    assert answer.schedule is not None
    assert check(other, answer.schedule, budget) == []
    assert answer.bound is not None
    assert simulate(other, answer.schedule).seconds / other.seconds - 1 >= answer.bound - 1e-9


@given(programs(max_ops=10), st.integers(0, 60))
def test_the_quick_bound_is_below_the_whole_one(program: Program, budget: int) -> None:
    quick = quick_bound(program, budget, Interrupt(), IntervalState(program))
    whole = cut_bound(program, budget)
    assert quick.bound <= whole.bound + 1e-6 or whole.infeasible
    assert whole.infeasible or not quick.infeasible


def _tight(program: Program) -> object:
    return planning.smallest_of(program, effort=200)[1]

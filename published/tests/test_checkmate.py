"""The stage model against exhaustive search, its two forms against each other, and the published chain."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.planners import Interrupt, Problem, Status, planner_named
from ebbtide.planners.bounds import stage_model
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.bounds.stage_model import StageModel
from ebbtide.planners.solvers.highs import Model
from ebbtide.step import legality
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from oracle.brute_force import optimal_overhead
from strategies import chain, examples, programs

FORMS = ("checkmate", "checkmate_free")
TOLERANCE = 3e-6


def budget_at(program: Program, share: float) -> int:
    unplanned = simulate(program, unplanned_schedule(program)).above_bytes
    floor, _ = floor_bytes(program)
    return int(floor + share * (unplanned - floor))


def overhead_of(program: Program, schedule) -> float:
    return simulate(program, schedule).seconds / program.seconds - 1.0


def unit_chain(nodes: int) -> Program:
    """A chain of unit ops of which the second half reads the first backwards (Checkmate, Appendix A)."""
    half = nodes // 2
    ops = [Op("0", "test", (), (0,), seconds=1.0)]
    for k in range(1, nodes):
        mirrored = nodes - 1 - k
        inputs = {k - 1} if k <= half or mirrored < 0 else {k - 1, mirrored}
        ops.append(Op(str(k), "test", tuple(sorted(inputs)), (k,), seconds=1.0))
    return Program("chain", tuple(ops), tuple(Buffer(str(k), 1, k) for k in range(nodes)), 0, gradients=(nodes - 1,))


@settings(max_examples=examples(150))
@given(program=programs(max_ops=7, max_tangents=1), share=st.floats(0.0, 1.0))
def test_both_forms_equal_exhaustive_search(program: Program, share: float) -> None:
    budget = budget_at(program, share)
    best = optimal_overhead(program, budget, ascending=True)
    anything = optimal_overhead(program, budget)
    assert best is None or (anything is not None and anything <= best + 1e-12)
    for form in FORMS:
        answer = planner_named(form)(Problem(program, budget, effort=50))
        if best is None:
            assert answer.schedule is None
            assert answer.status is Status.INFEASIBLE
            continue
        assert answer.status is Status.OPTIMAL
        assert answer.schedule is not None
        assert not legality.check(program, answer.schedule, budget)
        assert overhead_of(program, answer.schedule) == pytest.approx(best, abs=TOLERANCE)
        assert answer.bound is None or answer.bound <= best + 1e-9


@settings(max_examples=examples(100))
@given(program=programs(max_ops=9), share=st.floats(0.0, 1.0))
def test_rounding_is_legal_within_budget_and_above_the_relaxation(program: Program, share: float) -> None:
    budget = budget_at(program, share)
    for name in ("checkmate_lp", "checkmate_lp_pure"):
        answer = planner_named(name)(Problem(program, budget, effort=50))
        if answer.schedule is not None:
            assert not legality.check(program, answer.schedule, budget)
            assert answer.bound is None or answer.bound <= overhead_of(program, answer.schedule) + 1e-9


@pytest.mark.parametrize("budget", range(4, 18))
def test_every_budget_of_the_published_chain_is_feasible(budget: int) -> None:
    program = unit_chain(17)
    answer = planner_named("checkmate")(Problem(program, budget, effort=200))
    assert answer.status is Status.OPTIMAL
    assert answer.schedule is not None
    assert simulate(program, answer.schedule).above_bytes <= budget
    if budget == 4:
        assert overhead_of(program, answer.schedule) == pytest.approx(optimal_overhead(program, 4))
        assert simulate(program, answer.schedule).seconds == 26


def test_an_interrupt_gives_the_start_plan() -> None:
    program = chain(12)
    problem = Problem(program, budget_at(program, 0.3), effort=200, interrupt=Interrupt(0.5))
    answer = planner_named("checkmate")(problem)
    assert answer.status in (Status.TIME_LIMIT, Status.OPTIMAL)
    assert answer.schedule is not None


@pytest.mark.parametrize("planner", [*FORMS, "checkmate_lp", "checkmate_lp_pure"])
def test_a_model_of_too_many_columns_is_not_built(planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = chain(12)
    columns = len(StageModel(program, budget_at(program, 0.3)).model.cost)
    problem = Problem(program, budget_at(program, 0.3), effort=200)
    monkeypatch.setattr(stage_model, "MOST_COLUMNS", 20)
    monkeypatch.setattr(Model, "column", lambda *args, **kwargs: pytest.fail("a column was made"))
    answer = planner_named(planner)(problem)
    assert columns > 20
    assert answer.status is Status.TIME_LIMIT  # not infeasible: nobody has looked
    assert "20 are built" in answer.notes["solver"]


def test_progress_names_incumbent_and_bound() -> None:
    program = chain(6)
    seen: list[tuple[float | None, float | None]] = []
    budget = budget_at(program, 0.2)
    planner_named("checkmate")(
        Problem(program, budget, effort=10, progress=lambda p: seen.append((p.best_overhead, p.bound)))
    )
    assert any(best is not None and bound is not None and best >= bound - 1e-6 for best, bound in seen)


def test_rounding_tells_both_results() -> None:
    program = chain(8)
    answer = planner_named("checkmate_lp")(Problem(program, budget_at(program, 0.5), effort=50))
    assert {"pure overhead", "repaired overhead"} <= set(answer.notes)

"""Retention intervals against the optimum of tiny programs, and what happens when their solver does not answer.

OR-Tools is never imported here: it clashes with highspy. The oracle tests talk to one child process.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import UsageError
from ebbtide.planners import Interrupt, Problem, Status, planner_named
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.step import legality
from ebbtide.step.graph_file import program_from_graph
from ebbtide.step.program import Program
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide_published.planners import cp_child as _cp_child
from ebbtide_published.planners.moccasin import Solver, request_of, retention_plan
from oracle.brute_force import optimal_overhead
from strategies import chain, examples, programs, reruns

GRAPHS = Path(__file__).parents[3] / "shared" / "data" / "graphs"
MANY = 99  # copies: as many as there are stages

needs_solver = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="needs ortools (extra 'cp')")


def unplanned_bytes(program: Program) -> int:
    return simulate(program, unplanned_schedule(program)).above_bytes


def overhead_of(program: Program, schedule) -> float:
    return simulate(program, schedule).seconds / program.seconds - 1.0


@pytest.fixture(scope="module")
def solver() -> Iterator[Solver]:
    with Solver() as found:
        yield found


def solved(solver: Solver, program: Program, budget: int, *, fixed: bool = False, **options: Any) -> tuple[str, Any]:
    """The status, and the reruns of the last incumbent; ``fixed`` leaves the start plan no choice."""
    parameters = {"max_deterministic_time": 10.0, "fix_variables_to_their_hinted_value": fixed}
    request = request_of(program, budget, **options) | {"parameters": parameters}
    lines = list(solver.solve(request, Interrupt(60)))
    incumbents = [line["incumbent"] for line in lines if "incumbent" in line]
    return lines[-1]["status"], incumbents[-1] if incumbents else None


@needs_solver
@settings(max_examples=examples(60))
@given(program=programs(max_ops=8, max_tangents=1), share=st.floats(0.0, 1.0))
def test_the_optimum_is_that_of_exhaustive_search(solver: Solver, program: Program, share: float):
    floor, _ = floor_bytes(program)
    budget = int(floor + share * (unplanned_bytes(program) - floor))
    best = optimal_overhead(program, budget, ascending=True)
    status, found = solved(solver, program, budget, copies=MANY)
    if best is None:
        assert status == "INFEASIBLE"
        return
    assert status == "OPTIMAL"
    state = IntervalState(program)
    state.load(found)
    assert state.peak_bytes <= budget
    assert state.overhead == pytest.approx(best, abs=1e-7)


@needs_solver
@settings(max_examples=examples(50))
@given(data=st.data(), program=programs(max_ops=14))
def test_the_hint_of_a_start_plan_takes_the_bytes_that_the_plan_takes(
    solver: Solver, data: st.DataObject, program: Program
):
    state = IntervalState(program)
    state.load(data.draw(reruns(program)))
    # Reruns that nothing can read are no part of the model.
    state.load(request_of(program, state.peak_bytes, copies=1, reruns=state.reruns)["reruns"])
    status, found = solved(solver, program, state.peak_bytes, copies=2, reruns=state.reruns, fixed=True)
    assert status == "OPTIMAL"
    assert sorted(map(tuple, found)) == sorted(state.reruns)
    if state.peak_bytes:
        assert (
            solved(solver, program, state.peak_bytes - 1, copies=2, reruns=state.reruns, fixed=True)[0] == "INFEASIBLE"
        )


@pytest.mark.slow
@needs_solver
@settings(max_examples=examples(5))
@given(program=programs(max_ops=20), share=st.floats(0.3, 1.0))
def test_plans_are_legal_and_within_budget(program: Program, share: float):
    budget = int(share * unplanned_bytes(program))
    answer = planner_named("retention")(Problem(program, budget, effort=500))
    if answer.schedule is None:
        assert answer.status is Status.INFEASIBLE
    else:
        assert not legality.check(program, answer.schedule, budget)
        assert answer.bound is None or overhead_of(program, answer.schedule) >= answer.bound - 1e-6


@needs_solver
def test_more_copies_are_never_worse_and_one_is_the_unplanned_step():
    program = chain(6)
    problem = Problem(program, int(0.5 * unplanned_bytes(program)))
    two, three = (retention_plan(problem, copies=copies) for copies in (2, 3))
    assert two.status is Status.OPTIMAL
    assert three.status is Status.OPTIMAL
    assert three.bound is not None
    assert two.bound is not None
    assert three.bound <= two.bound + 1e-9
    assert retention_plan(problem, copies=2) == two


@pytest.mark.slow
@needs_solver
@pytest.mark.parametrize(
    ("graph", "share", "percent"),
    [("vgg16_b256_train", 85, 1.97), ("unet_b32_train", 80, 1.98), ("fcn8_b32_train", 80, 0.14)],
)
def test_published_graphs(graph: str, share: int, percent: float):
    file = GRAPHS / f"{graph}.json"
    if not file.exists():
        pytest.skip("the published graphs are not here")
    program = program_from_graph(json.loads(file.read_text()))
    answer = planner_named("retention")(Problem(program, unplanned_bytes(program) * share // 100))
    assert answer.status is Status.OPTIMAL
    assert answer.schedule is not None
    assert 100 * overhead_of(program, answer.schedule) == pytest.approx(percent, abs=0.005)


@needs_solver
def test_an_interrupt_ends_the_solver_and_keeps_the_best():
    program = chain(16)
    interrupt = Interrupt()

    def stop(progress: Any) -> None:
        if progress.stage == "retention intervals":
            interrupt.set()

    problem = Problem(program, int(0.5 * unplanned_bytes(program)), interrupt=interrupt, progress=stop)
    answer = planner_named("retention")(problem)
    assert answer.status in (Status.TIME_LIMIT, Status.OPTIMAL)
    assert answer.schedule is not None


@pytest.mark.parametrize(
    "text", ["raise SystemExit(3)", "print('{\"bound\": 0.0}', flush=True); import os; os.abort()"]
)
def test_a_solver_that_dies_leaves_the_start_point(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    child = tmp_path / "child.py"
    child.write_text(text)
    monkeypatch.setattr(_cp_child, "__file__", str(child))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    program = chain(8)
    budget = int(0.5 * unplanned_bytes(program))
    answer = planner_named("retention")(Problem(program, budget))
    assert answer.status is Status.FEASIBLE
    assert answer.schedule is not None
    assert "died" in answer.notes["solver"]


def test_a_missing_solver_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    program = chain(4)
    with pytest.raises(UsageError, match="pip install ortools"):
        planner_named("retention")(Problem(program, int(0.5 * unplanned_bytes(program))))


def test_what_fits_needs_no_solver(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Solver, "__enter__", lambda _: pytest.fail("a solver was started"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    program = chain(4)
    answer = planner_named("retention")(Problem(program, unplanned_bytes(program)))
    assert answer.status is Status.OPTIMAL
    assert answer.schedule == unplanned_schedule(program)

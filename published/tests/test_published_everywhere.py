"""Published planners where any planner may be asked: limits, tiers, bounds, and the command line."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import ebbtide
from ebbtide._api.estimate import capture_ahead
from ebbtide.cli import app
from ebbtide.options import Options
from ebbtide.planners import Problem, planner_named
from ebbtide.planners.bounds.cut_bound import cut_bound
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide.units import Budget
from ebbtide.zoo import GPTConfig, gpt
from layered import SIZE, layered, linked
from strategies import chain


@pytest.mark.parametrize("planner", ["checkmate", "checkmate_lp", "chain", "anneal", "chen_greedy"])
def test_a_limit_too_short_for_any_plan_gives_one_all_the_same(planner: str) -> None:
    options = PlanningOptions(planner=planner, time_limit_seconds=0.0)
    found = make_plan(chain(12), Budget.parse("60%"), resident_bytes=0, options=options)
    assert found.status is ebbtide.Status.TIME_LIMIT
    assert found.predicted_peak_bytes <= found.budget_bytes


def test_a_planner_that_only_recomputes_leaves_tiers_alone() -> None:
    program, card = layered(12), linked(10.0)
    options = PlanningOptions(machine=card, tiers=("host",), planner="per_block", effort=500)
    plan = make_plan(program, Budget(bytes=12 * SIZE), resident_bytes=0, options=options)
    assert plan.tiers == ()
    assert not plan.schedule.moves


def test_the_command_line_says_what_tiers_there_are() -> None:
    done = CliRunner().invoke(app, "plan zoo:mlp_chain --budget 60% --planner swap".split())
    assert done.exit_code == 2
    assert "give --tiers disk where the model is on CPU" in done.stderr


@pytest.mark.slow
def test_a_plan_that_fills_its_budget_to_the_byte_is_not_below_the_bound() -> None:
    case = gpt(8, GPTConfig(vocabulary=8192, length=512, layers=4, width=512, heads=8, dropout=0.1))
    program = capture_ahead(
        case.model, case.args, case.kwargs, name="gpt", options=Options(machine="v100-16gb")
    ).program
    plan = planner_named("min_cut")(
        Problem(program, 4 * simulate(program, unplanned_schedule(program)).above_bytes // 5)
    )
    assert plan.schedule is not None
    timeline = simulate(program, plan.schedule)
    assert cut_bound(program, timeline.above_bytes).bound <= timeline.seconds / program.seconds - 1.0

"""Planners side by side, the frontier, the largest batch: from programs and from models."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import ebbtide
from ebbtide._api.batches import judged, largest, one_forward
from ebbtide._api.estimate import AheadStep
from ebbtide.cli import app
from ebbtide.errors import BudgetError, UsageError
from ebbtide.planners import Interrupt, Progress
from ebbtide.planners.narration import INTERRUPTED
from ebbtide.planners.search.smallest import forget_smallest
from ebbtide.planning.frontier import frontier
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.planning.step_end import NOTHING_AFTER, StepEnd
from ebbtide.report.text.compare import row_of, write_rows
from ebbtide.step.program import Program
from ebbtide.step.refusal import Refusal
from ebbtide.units import Budget, format_bytes
from strategies import chain, programs

PROGRAM = chain(12)


def outcomes(budgets: list[str], planners: list[str], program: Program = PROGRAM) -> list[ebbtide.Plan | Refusal]:
    parsed = [Budget.parse(each) for each in budgets]
    return list(
        frontier(program, parsed, planners, resident_bytes=0, reserve_bytes=0, options=PlanningOptions(effort=200))
    )


def test_the_frontier_is_monotone_and_refuses_what_is_too_small() -> None:
    found = outcomes(["100%", "60%", "40%", "80%", "1%"], ["auto", "greedy", "keep_all"])
    assert [each.budget_bytes for each in found] == sorted(each.budget_bytes for each in found)
    for planner in ("auto", "greedy"):
        overheads = [each.overhead for each in found if isinstance(each, ebbtide.Plan) and each.planner == planner]
        assert len(overheads) == 4
        assert overheads == sorted(overheads, reverse=True)
        assert overheads[-1] == 0
    refused = [(each.planner, each.budget_bytes) for each in found if isinstance(each, Refusal)]
    assert ("auto", found[0].budget_bytes) in refused
    assert sum(planner == "keep_all" for planner, _ in refused) == 4


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x).square().mean()


def make(batch: int) -> ebbtide.Case:
    return ebbtide.Case(Blocks(), (torch.ones(batch * 8, 32),), {}, f"blocks-{batch}")


def test_sweep_captures_once_and_gives_a_plan_per_budget() -> None:
    case = make(8)
    plans = ebbtide.sweep(case.model, case.args, budgets=["1000%", "90%", "80%"], options=ebbtide.Options(effort=100))
    assert [plan.overhead for plan in plans] == sorted((plan.overhead for plan in plans), reverse=True)
    assert len({plan.program.fingerprint for plan in plans}) == 1
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes for plan in plans)


def test_sweep_says_which_budgets_have_no_plan() -> None:
    case = make(8)
    with pytest.warns(UserWarning, match=r"auto within 8.00 KiB \(8192 bytes\): the smallest for which"):
        plans = ebbtide.sweep(
            case.model, case.args, budgets=["90%", "8KiB"], name="blocks", options=ebbtide.Options(effort=100)
        )
    assert len(plans) == 1
    (refusal,) = plans.refusals
    assert (refusal.planner, refusal.budget_bytes) == ("auto", 8192)
    assert refusal.error.smallest_bytes <= plans[0].budget_bytes
    text = str(plans)
    assert "blocks within 8.00 KiB" in text
    assert "too small: plans were found from" in text
    assert not ebbtide.sweep(case.model, case.args, budgets=["90%"], options=ebbtide.Options(effort=100)).refusals


def test_sweep_raises_where_nothing_is_workable() -> None:
    case = make(2)
    with pytest.raises(BudgetError, match="smallest for which a plan was found"):
        ebbtide.sweep(case.model, case.args, budgets=["1KiB", "2KiB"], options=ebbtide.Options(effort=50))
    with pytest.raises(UsageError, match="does not exist"):
        ebbtide.sweep(case.model, case.args, budgets=["1GiB"], planners=["nobody"])


@pytest.mark.parametrize("guess", [1, 3, 37, 38, 200])
@pytest.mark.parametrize("answer", [0, 1, 37, 64])
def test_the_largest_is_found_from_any_guess(answer: int, guess: int) -> None:
    asked: list[int] = []

    def fits(batch: int) -> bool:
        asked.append(batch)
        return batch <= answer

    assert largest(fits, guess) == answer
    assert 0 not in asked


@pytest.mark.parametrize("guess", [1, 37, 200])
@pytest.mark.parametrize("coarse", [2, 5, 16])
@pytest.mark.parametrize("answer", [0, 1, 3, 37, 61, 64])
def test_a_coarse_search_is_below_the_largest_by_less_than_it_is_coarse(answer: int, coarse: int, guess: int) -> None:
    assert answer - coarse < largest(lambda batch: batch <= answer, guess, coarse) <= answer


@pytest.mark.parametrize("planner", ["auto", "greedy"])
@pytest.mark.parametrize("share", ["10%", "45%", "60%"])
def test_a_batch_is_judged_as_a_plan_made_to_its_end_says(planner: str, share: str) -> None:
    step, budget = AheadStep(PROGRAM, 0, 0), Budget.parse(share)
    options = PlanningOptions(planner=planner, effort=200)
    try:
        best = step.plan(budget, options).overhead
    except BudgetError:
        assert judged(step, budget, None, options) is None
        return
    assert judged(step, budget, None, options) is not None
    for limit in (0.0, best / 2, best - 1e-3, best, best + 1e-3, 2 * best):
        plan = judged(step, budget, limit, options)
        assert (plan is not None) == (best <= limit)
        assert plan is None or (plan.overhead <= limit and plan.predicted_peak_bytes <= plan.budget_bytes)


@pytest.mark.long
@pytest.mark.slow
def test_the_largest_batch_is_tight_and_grows_with_recomputation() -> None:
    budget = 250_000
    free = ebbtide.max_batch(make, budget=budget, options=ebbtide.Options(effort=200))
    none = ebbtide.max_batch(make, budget=budget, overhead=0.0, options=ebbtide.Options(effort=200))
    once = ebbtide.max_batch(make, budget=budget, overhead="one-forward", options=ebbtide.Options(effort=200))
    assert none.unplanned_batch == free.unplanned_batch > 0
    assert none.unplanned_batch <= none.batch <= once.batch <= free.batch
    assert free.batch > free.unplanned_batch
    assert free.plan is not None
    assert free.plan.predicted_peak_bytes <= budget
    assert dict(free.captured)[free.batch]
    assert not dict(free.captured)[free.batch + 1]
    assert once.plan is not None
    assert once.overhead_limit is not None
    assert once.plan.overhead <= once.overhead_limit == one_forward(once.plan.program)
    case = make(free.batch + 1)
    with pytest.raises(BudgetError):
        ebbtide.plan(case.model, case.args, budget=budget, options=ebbtide.Options(effort=200))


@pytest.mark.slow
def test_a_batch_of_one_that_does_not_fit_is_refused_with_the_least_budget_for_it() -> None:
    case = make(8)
    with pytest.raises(BudgetError) as refused:  # a plan that fits as captured has not looked at what could be less
        ebbtide.plan(case.model, case.args, budget="20KiB", options=ebbtide.Options(effort=50))
    smallest = refused.value.smallest_bytes
    with pytest.raises(BudgetError, match="not even a batch of 1 fits") as raised:
        ebbtide.max_batch(lambda batch: make(8 * batch), budget="20KiB", options=ebbtide.Options(effort=50))
    assert raised.value.budget_bytes == 20 * 1024
    assert raised.value.smallest_bytes == smallest
    assert str(smallest) in str(raised.value)
    with pytest.raises(BudgetError, match=r"not even a batch of 1 fits.*at most 0\.00 % is allowed") as raised:
        ebbtide.max_batch(
            lambda batch: make(8 * batch), budget=smallest, overhead=0.0, options=ebbtide.Options(effort=50)
        )
    assert raised.value.smallest_bytes <= smallest
    enough = re.search(r"(\d+) need no recomputation", str(raised.value))
    assert enough is not None
    assert (
        ebbtide.max_batch(
            lambda batch: make(8 * batch), budget=int(enough[1]), overhead=0.0, options=ebbtide.Options(effort=50)
        ).batch
        == 1
    )


def test_progress_of_several_plans_says_which_is_made() -> None:
    told: list[str] = []
    options = PlanningOptions(effort=50, progress=lambda each: told.append(str(each)))
    budgets = [Budget.parse("70%")]
    list(frontier(PROGRAM, budgets, ["greedy", "auto"], resident_bytes=0, reserve_bytes=0, options=options))
    assert {line.partition(" within ")[0] for line in told if " within " in line} == {"greedy", "auto"}


@pytest.mark.slow
def test_a_table_of_measured_plans_says_what_its_bounds_are_of() -> None:
    rows = [row_of("chain", each).measured(1, 0.01) for each in outcomes(["45%"], ["auto", "auto_free"], chain(6))]
    assert all(row.bound is not None and row.bound > 0.01 for row in rows)
    stream = StringIO()
    write_rows(rows, stream)
    notes = [line for line in stream.getvalue().splitlines() if line.startswith("bounds and gaps are of the predicted")]
    assert [line.partition("; ")[2] for line in notes] == [
        f"{row.planner}: {row.bound_class}" for row in rows if "costs: given" in row.bound_class
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "50%"}, "says nothing about a batch"),
        ({"budget": "1GiB", "overhead": "two-forwards"}, "accepted: a fraction"),
        ({"budget": "1GiB", "overhead": -0.1}, "accepted: a fraction"),
        ({"budget": "1GiB", "overhead": 20}, "would be 2000% more time"),
        ({"budget": "1GiB", "make_case": nn.Embedding(3, 4)}, "a function from a batch.*not Embedding: max_batch"),
        ({"budget": "1GiB", "make_case": Blocks().forward}, "not method of a module: max_batch"),
        ({"budget": "1GiB", "make_case": 3}, "not int: max_batch"),
    ],
)
def test_bad_input_to_max_batch_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ebbtide.max_batch(**{"make_case": make, **arguments})  # type: ignore[arg-type]


SHORT_CHAIN = """
from ebbtide.zoo import mlp_chain

def chain(batch):
    return mlp_chain(batch, layers=6)
"""


def graph_file(folder: Path) -> Path:
    nodes = [{"id": k, "cost_cpu": 1, "cost_ram": 10, "backward": k > 4} for k in range(9)]
    links = [{"source": k, "target": k + 1} for k in range(8)]
    links += [{"source": 7 - k, "target": k} for k in range(5, 8)]
    path = folder / "graph.json"
    path.write_text(json.dumps({"graph": {"name": "small"}, "nodes": nodes, "links": links}))
    return path


def test_compare_prints_a_table_and_a_list(tmp_path: Path) -> None:
    path = str(graph_file(tmp_path))
    options = ["--budgets", "100%,70%", "--planners", "auto,keep_all,greedy"]
    text = CliRunner().invoke(app, ["compare", path, *options])
    assert text.exit_code == 0
    assert "small within" in text.stdout
    listed = CliRunner().invoke(app, ["compare", path, *options, "--json"])
    rows = json.loads(listed.stdout.strip().splitlines()[-1])
    assert {(row["planner"], row["status"]) for row in rows if row["budget_bytes"] < 60} >= {("keep_all", "INFEASIBLE")}
    keys = "case planner status budget_bytes predicted_peak_bytes measured_peak_bytes overhead measured_overhead"
    assert set(f"{keys} bound bound_class gap rewritten smallest_bytes reason plan_seconds".split()) == set(rows[0])
    for row in rows:
        assert (row["status"] == "INFEASIBLE") is bool(row["reason"]) is (row["smallest_bytes"] is not None)


def test_compare_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    path = str(graph_file(tmp_path))
    run = CliRunner().invoke(app, ["compare", path, "--run"])
    assert run.exit_code == 2
    assert "--run cannot apply" in run.stderr
    elsewhere = CliRunner().invoke(app, ["compare", "zoo:mlp_chain", "--machine", "a100-80gb", "--run"])
    assert elsewhere.exit_code == 2
    nobody = CliRunner().invoke(app, ["compare", path, "--planners", "nobody"])
    assert "does not exist" in nobody.stderr
    little = CliRunner().invoke(app, ["compare", path, "--budgets", "30%,20%", "--planners", "auto,keep_all"])
    assert little.exit_code == 2
    assert little.stdout.count("INFEASIBLE") == 4
    assert little.stdout.count("  too small: plans were found from ") == 2
    assert "smallest for which a plan was found" in little.stderr


@pytest.mark.slow
def test_compare_runs_plans_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # a case's folder is added to it
    (tmp_path / "short.py").write_text(SHORT_CHAIN)
    case = f"{tmp_path / 'short.py'}:chain"
    arguments = ["compare", case, "--size", "64", "--budgets", "85%", "--planners", "greedy,keep_all"]
    result = CliRunner().invoke(app, [*arguments, "--effort", "100", "--run", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["planner"]: row for row in json.loads(result.stdout.strip().splitlines()[-1])}
    assert rows["keep_all"]["measured_peak_bytes"] is None
    greedy = rows["greedy"]
    assert abs(greedy["measured_peak_bytes"] - greedy["predicted_peak_bytes"]) <= 1_000
    assert greedy["measured_peak_bytes"] <= greedy["budget_bytes"]
    assert greedy["measured_overhead"] > -0.5


@pytest.mark.slow
def test_max_batch_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # a case's folder is added to it
    (tmp_path / "short.py").write_text(SHORT_CHAIN)
    case = f"{tmp_path / 'short.py'}:chain"
    arguments = ["max-batch", case, "--budget", "24MiB", "--machine", "v100-16gb", "--effort", "100"]
    result = CliRunner().invoke(app, [*arguments, "--overhead", "30%", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert found["batch"] >= found["unplanned_batch"] > 0
    assert found["plan"]["overhead"] <= 0.3
    graph = CliRunner().invoke(app, ["max-batch", str(graph_file(tmp_path)), "--budget", "1GiB"])
    assert "has a fixed batch" in graph.stderr
    limit = CliRunner().invoke(app, ["max-batch", "zoo:resnet50", "--budget", "1GiB", "--overhead", "much"])
    assert "accepted: one-forward" in limit.stderr


@pytest.mark.parametrize("planner", ["auto", "auto_free", "greedy"])
def test_a_limit_too_short_for_any_plan_gives_one_all_the_same(planner: str) -> None:
    options = PlanningOptions(planner=planner, time_limit_seconds=0.0)
    found = make_plan(PROGRAM, Budget.parse("60%"), resident_bytes=0, options=options)
    assert found.status is ebbtide.Status.TIME_LIMIT
    assert found.predicted_peak_bytes <= found.budget_bytes


@pytest.mark.parametrize("own_limit", [None, 1e6])
def test_a_time_limit_holds_with_an_interrupt_given(own_limit: float | None) -> None:
    interrupt = Interrupt(own_limit)
    options = PlanningOptions(time_limit_seconds=0.0, interrupt=interrupt)
    found = make_plan(PROGRAM, Budget.parse("60%"), resident_bytes=0, options=options)
    assert found.status is ebbtide.Status.TIME_LIMIT
    assert not interrupt, "the caller's own is left alone"
    options = PlanningOptions(time_limit_seconds=1e6, interrupt=interrupt)
    interrupt.set()
    found = make_plan(PROGRAM, Budget.parse("60%"), resident_bytes=0, options=options)
    assert found.status is ebbtide.Status.TIME_LIMIT


def test_what_follows_an_interrupt_knows_that_it_was_set() -> None:
    interrupt = Interrupt()
    limited = interrupt.or_after(0.0)
    unlimited = limited.without_limit()
    assert (bool(limited), limited.interrupted, bool(unlimited)) == (True, False, False)
    interrupt.set()
    assert (bool(limited), limited.interrupted, bool(unlimited)) == (True, True, True)
    other = Interrupt().or_after(1e6)
    other.set()
    assert other


def test_ctrl_c_notes_what_it_interrupted_and_what_was_known() -> None:
    forget_smallest()
    told: list[Progress] = []

    def tell(progress: Progress) -> None:
        told.append(progress)
        if len([each for each in told if each.smallest_bytes is not None]) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        make_plan(
            chain(12), Budget.parse("5%"), resident_bytes=7, options=PlanningOptions(planner="greedy", progress=tell)
        )
    assert raised.value.__notes__ == [f"{INTERRUPTED}{told[-1]}"]
    known = [each.smallest_bytes for each in told if each.smallest_bytes is not None]
    assert known == sorted(known, reverse=True)
    whole = make_plan(chain(12), Budget.parse("100%"), resident_bytes=7)
    assert known[0] == whole.baseline_peak_bytes
    assert known[-1] >= whole.smallest_bytes


@settings(max_examples=40)
@given(
    program=programs(max_ops=12),
    resident=st.integers(2, 200),
    reserve=st.sampled_from([0, 3, 100, 5000]),
    end=st.sampled_from(
        [NOTHING_AFTER, StepEnd(40, what="hooks", remedies=("remove them",)), StepEnd(9, 30, "it", ("this",))]
    ),
)
def test_every_budget_that_a_refusal_advises_is_accepted(
    program: Program, resident: int, reserve: int, end: StepEnd
) -> None:
    """Shares are of a peak without the reserve: of a small step the smallest budget is more than 100 % of it."""
    given_to = {"resident_bytes": resident, "reserve_bytes": reserve, "end": end}
    options = PlanningOptions(planner="least_memory", effort=100)
    with pytest.raises(BudgetError) as raised:
        make_plan(program, Budget(bytes=1), options=options, **given_to)  # type: ignore[arg-type]
    text, needed = str(raised.value), raised.value.smallest_bytes
    advised = re.search(r"Does not fit: ask for at least (\d+) bytes(?: \(.*? .?i?B\))?(?: or ([\d.]+%))?", text)
    assert advised is not None
    assert int(advised[1]) == needed
    is_more = needed > end.unplanned_bytes(program, resident)
    assert (advised[2] is None) == is_more
    for budget in (Budget(bytes=needed), Budget.parse(advised[2] or "100%")):
        made = make_plan(program, budget, options=options, **given_to)  # type: ignore[arg-type]
        assert made.budget_bytes >= needed
        [found] = frontier(program, [budget], ["least_memory"], options=options, **given_to)  # type: ignore[arg-type]
        assert found.budget_bytes == made.budget_bytes
    assert (f"a plan keeps {format_bytes(reserve)} ({reserve} bytes) in reserve" in text) == is_more
    bytes_only = replace(options, takes_shares=False)
    with pytest.raises(BudgetError) as raised:
        make_plan(program, Budget(bytes=1), options=bytes_only, **given_to)  # type: ignore[arg-type]
    assert "%" not in raised.value.remedy


def test_a_time_limit_does_not_change_what_is_called_workable() -> None:
    messages: list[str] = []
    for limit in (None, 0.0):
        options = PlanningOptions(time_limit_seconds=limit)
        with pytest.raises(BudgetError) as raised:
            make_plan(chain(9), Budget.parse("5%"), resident_bytes=0, options=options)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]

"""``ebbflow compare``: planners side by side on one case, over budgets.

With ``--json`` one list of objects with keys ``case, planner, status, budget_bytes, predicted_peak_bytes,
measured_peak_bytes, overhead, measured_overhead, bound, bound_class, gap, plan_seconds``; what a planner does not know
or was not asked is ``null``.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ebbflow._api.estimate import AheadStep, capture_ahead
from ebbflow._api.timed_runs import try_plans
from ebbflow.case import Case
from ebbflow.cli.cases import load_case, refuse_for_graphs
from ebbflow.cli.interruption import KeepBest
from ebbflow.cli.output import write_json
from ebbflow.errors import UsageError
from ebbflow.planners import missing_extra, planner_named, planner_names
from ebbflow.planning.frontier import Refusal
from ebbflow.planning.pipeline import DEFAULT_EFFORT, PlanningOptions
from ebbflow.report.text.compare import Row, row_of, write_rows
from ebbflow.report.text.progress import ProgressDisplay
from ebbflow.step.machine import is_elsewhere, machine_named
from ebbflow.step.plan import Plan
from ebbflow.units import Budget

__all__ = ["compare"]


def compare(
    case: Annotated[str, typer.Argument(help="zoo:NAME, FILE.py:function or graph.json")],
    budgets: Annotated[str, typer.Option(help="separated by commas: 80%,60%,12GiB")] = "80%,60%,40%",
    planners: Annotated[str, typer.Option(help="names separated by commas, or all")] = "all",
    machine: Annotated[
        str | None, typer.Option(help="of the catalogue, e.g. a100-80gb: an estimate; default: measured here")
    ] = None,
    size: Annotated[int | None, typer.Option(help="passed to the case: batch, length or layers")] = None,
    effort: Annotated[int, typer.Option(min=0, help="local-search moves per plan")] = DEFAULT_EFFORT,
    time_limit: Annotated[float | None, typer.Option(min=0, help="seconds per plan")] = 60.0,
    run: Annotated[bool, typer.Option("--run", help="run every plan here and measure it")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON list")] = False,
) -> None:
    """Plan one training step with several planners and hold them against each other.

    Ctrl-C ends the plan that is being made with the best found so far, and the comparison after it. Exit code 2 and the
    reason if no planner has a plan for any of the budgets.
    """
    parsed = [Budget.parse(each.strip()) for each in budgets.split(",")]
    names = _names(planners)
    target = machine_named(machine) if machine is not None else None
    if run and is_elsewhere(target):
        raise UsageError(f"--run cannot run on {machine}, which is not this machine; leave --machine or --run out")
    with ProgressDisplay(sys.stderr) as display:
        display.stage("reading the case")
        loaded = load_case(case, size, fake=is_elsewhere(target))
        if isinstance(loaded, Case):
            step = capture_ahead(
                loaded.model, loaded.args, loaded.kwargs, machine=target, progress=display, name=loaded.name
            )
        else:
            refuse_for_graphs(case, {"--size": size, "--machine": machine, "--run": run or None})
            step = AheadStep(loaded, 0, 0)
        outcomes: list[Plan | Refusal] = []
        with KeepBest(display, None) as keeper:
            options = PlanningOptions(effort=effort, time_limit_seconds=time_limit, progress=keeper.tell)
            for outcome in step.frontier(parsed, names, options):
                outcomes.append(outcome)
                if keeper.interrupt.interrupted:
                    break
        rows = [row_of(step.program.name, outcome) for outcome in outcomes]
        if run:
            assert isinstance(loaded, Case)
            rows = _tried(loaded, outcomes, rows, display)
    if as_json:
        write_json([row.to_json() for row in rows])
    else:
        write_rows(rows, sys.stdout)
    refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    if refusals and len(refusals) == len(outcomes):
        raise refusals[-1].error  # no budget had a plan: why, and the least that would


def _names(planners: str) -> list[str]:
    """The planners asked for; of ``all``, those that are installed."""
    if planners != "all":
        names = [each.strip() for each in planners.split(",")]
        for name in names:
            planner_named(name)
        return names
    for name in planner_names():
        if missing := missing_extra(name):
            print(f"left out: {missing}", file=sys.stderr)
    return [name for name in planner_names() if not missing_extra(name)]


def _tried(case: Case, outcomes: list[Plan | Refusal], rows: list[Row], display: ProgressDisplay) -> list[Row]:
    """The rows with what running their plans gave."""
    plans = [outcome for outcome in outcomes if isinstance(outcome, Plan)]
    trials = try_plans(case, plans)
    found: list[Row] = []
    for outcome, row in zip(outcomes, rows, strict=True):
        if isinstance(outcome, Plan):
            display.stage(f"running {outcome.planner} at {row.budget_bytes} bytes")
            trial = next(trials)
            row = row.measured(trial.measured_peak_bytes, trial.measured_overhead)
        found.append(row)
    return found

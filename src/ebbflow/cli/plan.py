"""``ebbflow plan``: what a step would take under a budget, before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import ebbflow
from ebbflow.case import Case
from ebbflow.cli.cases import load_case, refuse_for_graphs
from ebbflow.cli.interruption import KeepBest
from ebbflow.cli.output import check_writable, save_plan, write_json
from ebbflow.planners import planner_named
from ebbflow.planning.pipeline import DEFAULT_EFFORT, PlanningOptions, make_plan
from ebbflow.report.text.plan import write_plan
from ebbflow.report.text.progress import ProgressDisplay
from ebbflow.step.machine import is_elsewhere, machine_named
from ebbflow.step.plan import Plan
from ebbflow.units import Budget

__all__ = ["plan", "planned_case"]


def plan(
    case: Annotated[str, typer.Argument(help="zoo:NAME, FILE.py:function or graph.json")],
    budget: Annotated[str, typer.Option(help="peak allowed: 12GiB, 800MiB, 8GB, or 60% of the unplanned peak")],
    planner: Annotated[str, typer.Option(help="name of the planner")] = "auto",
    machine: Annotated[
        str | None, typer.Option(help="of the catalogue, e.g. a100-80gb: an estimate; default: measured here")
    ] = None,
    size: Annotated[int | None, typer.Option(help="passed to the case: batch, length or layers")] = None,
    out: Annotated[Path | None, typer.Option(help="write the plan to this file")] = None,
    effort: Annotated[int, typer.Option(min=0, help="local-search moves")] = DEFAULT_EFFORT,
    time_limit: Annotated[float | None, typer.Option(min=0, help="seconds; the best plan so far is kept")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Plan a training step under a budget, without running it.

    Ctrl-C ends planning with the best plan found so far; a second one aborts.
    """
    check_writable(out)
    planner_named(planner)
    limit = Budget.parse(budget)
    target = machine_named(machine) if machine is not None else None
    with ProgressDisplay(sys.stderr) as display, KeepBest(display, time_limit) as keeper:
        options = PlanningOptions(
            planner=planner, effort=effort, machine=target, interrupt=keeper.interrupt, progress=keeper.tell
        )
        made = planned_case(case, size, limit, options, display)
    if keeper.interrupt.interrupted:
        print("stopped by Ctrl-C; this is the best plan found until then", file=sys.stderr)
    save_plan(made, out)
    if as_json:
        write_json(made.summary())
    else:
        write_plan(made, sys.stdout)


def planned_case(
    text: str, size: int | None, budget: Budget, options: PlanningOptions, display: ProgressDisplay
) -> Plan:
    """The plan for what ``text`` names: a published graph as it is, a model after capture.

    Raises:
        UsageError: if options were given that a graph file has no use for.
    """
    display.stage("reading the case")
    case = load_case(text, size, fake=is_elsewhere(options.machine))
    if isinstance(case, Case):
        return ebbflow.plan(
            case.model,
            case.args,
            case.kwargs,
            budget=budget,
            planner=options.planner,
            machine=options.machine,
            effort=options.effort,
            interrupt=options.interrupt,
            progress=options.progress,
            name=case.name,
        )
    refuse_for_graphs(text, {"--size": size, "--machine": options.machine})
    display.stage("planning")
    return make_plan(case, budget, resident_bytes=0, options=options)

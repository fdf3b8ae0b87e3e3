"""``ebbtide plan``: what a step would take under a budget, before anything runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.arguments import (
    AsJson,
    CaseName,
    Effort,
    Gradients,
    Image,
    Layers,
    Length,
    MachineName,
    MaxNorm,
    OffloadOptimizer,
    OptimizerName,
    PlannerName,
    ReportFile,
    Rewrites,
    Scaled,
    Seed,
    Size,
    StepPlace,
    Tiers,
    TimeLimit,
    offloading,
    optimizer_named,
    several_tiers,
    sizes_of_zoo,
)
from ebbtide.cli.imports import import_large
from ebbtide.cli.interruption import KeepBest
from ebbtide.cli.output import check_page, check_plan, save_plan, save_report, write_json
from ebbtide.cli.steps import captured_step, check_request
from ebbtide.options import DEFAULT_EFFORT, Options
from ebbtide.units import Budget

__all__ = ["plan"]


def plan(
    case: CaseName,
    budget: Annotated[str, typer.Option(help="peak allowed: 12GiB, 800MiB, 8GB, or 60% of the unplanned peak")],
    planner: PlannerName = "auto",
    machine: MachineName = None,
    tiers: Tiers = None,
    size: Size = None,
    layers: Layers = None,
    length: Length = None,
    image: Image = None,
    optimizer: OptimizerName = None,
    rewrites: Rewrites = None,
    offload_optimizer: OffloadOptimizer = False,
    step: StepPlace = None,
    max_norm: MaxNorm = None,
    scaler: Scaled = False,
    gradients: Gradients = None,
    out: Annotated[Path | None, typer.Option(help="write the plan to this file")] = None,
    report: ReportFile = None,
    effort: Effort = DEFAULT_EFFORT,
    time_limit: TimeLimit = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Plan a training step under a budget, without running it.

    Ctrl-C ends planning with the best plan found so far; a second one aborts.
    """
    check_plan(out)
    check_page(report)
    asked = Options(
        planner=planner,
        machine=machine,
        tiers=several_tiers(tiers),
        optimizer=optimizer_named(optimizer),
        rewrites=rewrites,  # type: ignore[arg-type]  # checked by Options
        offload_optimizer=offloading(offload_optimizer, tiers),
        step=step,  # type: ignore[arg-type]  # checked by Options
        max_norm=max_norm,
        gradients=gradients,  # type: ignore[arg-type]  # checked by Options
        effort=effort,
        time_limit=time_limit,
        seed=seed,
    )
    limit = Budget.parse(budget)
    check_request(case, size, asked, scaler=scaler or None)
    sizes = sizes_of_zoo(case, layers=layers, length=length, image=image)

    import_large("numpy", "torch")
    from ebbtide.planning.pipeline import PlanningOptions
    from ebbtide.report.records.page import page_of
    from ebbtide.report.text.plan import write_plan
    from ebbtide.report.text.progress import ProgressDisplay

    with ProgressDisplay(sys.stderr) as display, KeepBest(display, time_limit) as keeper:
        options = replace(asked, time_limit=None, interrupt=keeper.interrupt, progress=keeper.tell)
        captured, _ = captured_step(case, size, options, display, sizes, scaled=scaler)
        display.stage("planning")
        made = captured.plan(limit, PlanningOptions.of(options))
    if keeper.interrupt.interrupted:
        print("stopped by Ctrl-C; this is the best plan found until then", file=sys.stderr)
    save_plan(made, out)
    save_report(page_of(made), report)
    if as_json:
        write_json(made.summary())
    else:
        write_plan(made, sys.stdout)

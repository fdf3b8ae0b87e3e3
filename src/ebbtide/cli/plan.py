"""``ebbtide plan``: what a step would take under a budget, before anything runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ebbtide._api.auto_budget import AUTO, budget_from
from ebbtide.cli.arguments import AsJson, CaseName, ReportFile, Size, Verbose, check_sizes
from ebbtide.cli.imports import import_large
from ebbtide.cli.interruption import KeepBest
from ebbtide.cli.options import Sizes, with_options
from ebbtide.cli.output import check_page, check_plan, save_plan, save_report, write_json
from ebbtide.cli.refusals import as_options
from ebbtide.cli.steps import captured_step, check_request
from ebbtide.options import Options
from ebbtide.report.text.terminal import on_terminal
from ebbtide.units import format_bytes

__all__ = ["plan"]


@with_options()
def plan(
    *,
    case: CaseName,
    budget: Annotated[
        str, typer.Option(help="peak allowed: 12GiB, 800MiB, 60% of the unplanned peak, or auto: what the machine has")
    ] = AUTO,
    options: Options,
    size: Size = None,
    sizes: Sizes,
    out: Annotated[Path | None, typer.Option(help="write the plan to this file")] = None,
    report: ReportFile = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Say whether a training step fits a budget, and what that costs, without running it.

    Ctrl-C ends planning with the best plan found so far; a second one aborts.
    """
    check_plan(out)
    check_page(report)
    limit = budget_from(budget, machine=options.target)
    check_request(case, size, options)
    check_sizes(case, sizes)

    import_large("numpy", "torch")
    from ebbtide.planning.pipeline import PlanningOptions
    from ebbtide.report.records.page import page_of
    from ebbtide.report.text.plan import write_plan
    from ebbtide.report.text.progress import ProgressDisplay

    with ProgressDisplay(sys.stderr) as display, KeepBest(display, options.time_limit) as keeper:
        options = replace(options, time_limit=None, interrupt=keeper.interrupt, progress=keeper.tell)
        captured, _ = captured_step(case, size, options, display, sizes)
        display.stage("planning")
        if limit.bytes is not None and limit.bytes < captured.resident_bytes:
            there = f"{format_bytes(captured.resident_bytes)} are there before the step"
            display.stage(f"it does not fit, {there}; looking for the smallest workable budget")
        made = captured.plan(limit, PlanningOptions.of(options))
    if keeper.interrupt.interrupted:
        print("stopped by Ctrl-C; this is the best plan found until then", file=sys.stderr)
    save_plan(made, out)
    save_report(page_of(made), report)
    if as_json:
        write_json(made.summary())
        return
    stream = on_terminal(sys.stdout)
    print(as_options(str(made)), file=stream)
    if verbose:
        write_plan(made, stream)

"""``ebbtide demo``: a language model trained under half of its peak, bit for bit as in eager, with the proof."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.arguments import ReportFile
from ebbtide.cli.imports import import_large
from ebbtide.cli.interruption import KeepBest
from ebbtide.cli.output import check_page, check_plan, save_plan, save_report, write_json
from ebbtide.report.text.terminal import on_terminal
from ebbtide.units import Budget

__all__ = ["demo"]

_SIZE = typer.Option(min=1, hidden=True)


def demo(
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 10,
    budget: Annotated[str, typer.Option(help="of the planned copy: 300MiB, or 50% of the unplanned peak")] = "50%",
    out: Annotated[Path | None, typer.Option(help="write the plan to this file")] = None,
    report: ReportFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    layers: Annotated[int, _SIZE] = 6,
    width: Annotated[int, _SIZE] = 256,
    length: Annotated[int, _SIZE] = 256,
    batch: Annotated[int, _SIZE] = 4,
) -> None:
    """Train a GPT on the Python standard library's sources: eager, with checkpoints, and within a budget, side by side.

    Ctrl-C ends training as soon as there is something to show; a second one aborts. Exit code 0 says that losses,
    parameters and random state are bit-equal to eager's and that the measured peak is within the budget; 1 says that
    something of this is not so.
    """
    check_plan(out)
    check_page(report)
    Budget.parse(budget)

    import_large("numpy", "torch")
    from ebbtide.demo.training import DemoConfig, run_demo
    from ebbtide.report.records.page import page_of
    from ebbtide.report.text.demo import write_demo
    from ebbtide.report.text.progress import ProgressDisplay

    config = DemoConfig(steps=steps, budget=budget, layers=layers, width=width, length=length, batch=batch)
    with ProgressDisplay(sys.stderr) as display, KeepBest(display) as keeper:
        record, plan = run_demo(config, keeper.tell, keeper.interrupt)
    if keeper.interrupt.interrupted:
        print(f"stopped by Ctrl-C after {record.steps} of {steps} steps; this is what they show", file=sys.stderr)
    save_plan(plan, out)
    save_report(page_of(plan, measured=record.measured), report)
    if as_json:
        write_json(record.to_json())
    else:
        write_demo(record, on_terminal(sys.stdout))
    if not record.within_budget:
        raise typer.Exit(1)

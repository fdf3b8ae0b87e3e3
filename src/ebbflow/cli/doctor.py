"""``ebbflow doctor``: what a training step holds, what pins its memory, and what would lower it.

With ``--json`` one object. Its keys are the attributes of :class:`ebbflow.findings.Findings`, and two more:
``captured`` (whether the step is one program) and ``breaks`` (a list of ``reason, source, remedy``; empty if it is).
A step that is not one program has only ``case``, ``captured`` and ``breaks``, and the exit code is 2.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from ebbflow.cli.output import write_json
from ebbflow.cli.plan import planned_case
from ebbflow.errors import CaptureError
from ebbflow.planning.pipeline import PlanningOptions
from ebbflow.report.records.diagnosis import Break, break_of, find
from ebbflow.report.text.doctor import write_break, write_findings
from ebbflow.report.text.progress import ProgressDisplay
from ebbflow.step.machine import machine_named
from ebbflow.units import Budget

__all__ = ["doctor"]

_ANY_BUDGET = Budget(bytes=2**62)  # so that the plan is the unplanned step itself


def doctor(
    case: Annotated[str, typer.Argument(help="zoo:NAME, FILE.py:function or graph.json")],
    machine: Annotated[
        str | None, typer.Option(help="of the catalogue, e.g. a100-80gb: an estimate; default: measured here")
    ] = None,
    size: Annotated[int | None, typer.Option(help="passed to the case: batch, length or layers")] = None,
    top: Annotated[int, typer.Option(min=1, help="how many places to list by bytes")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Capture a training step and tell what was found, without running it.

    Graph breaks; random, opaque and single-run ops; what is changed in place; the largest buffers and those at the
    unplanned peak by module and line; what pins the floor, and what would lower it.
    """
    target = machine_named(machine) if machine is not None else None
    with ProgressDisplay(sys.stderr) as display:
        options = PlanningOptions(planner="keep_all", machine=target, progress=display)
        try:
            found = find(planned_case(case, size, _ANY_BUDGET, options, display), top)
        except CaptureError as error:
            found = break_of(str(error))
    if isinstance(found, Break):
        if as_json:
            write_json({"case": case, "captured": False, "breaks": [asdict(found)]})
        else:
            write_break(case, found, sys.stdout)
        raise typer.Exit(2)
    if as_json:
        write_json({**found.to_json(), "captured": True, "breaks": []})
    else:
        write_findings(found, sys.stdout)

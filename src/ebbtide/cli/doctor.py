"""``ebbtide doctor``: what a training step holds, what pins its memory, and what would lower it.

With ``--json`` one object. Its keys are the attributes of the findings (``report.records.diagnosis``), and two more:
``captured`` (whether the step is one program) and ``breaks`` (a list of ``reason, source, remedy``; empty if it is).
A step that is not one program has only ``case``, ``captured`` and ``breaks``, and the exit code is 2.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Annotated

import typer

from ebbtide.cli.arguments import AsJson, CaseName, Size, check_sizes
from ebbtide.cli.imports import import_large
from ebbtide.cli.options import Sizes, with_options
from ebbtide.cli.output import write_json
from ebbtide.cli.steps import captured_step, check_request
from ebbtide.errors import CaptureError, UsageError
from ebbtide.options import Options
from ebbtide.report.text.terminal import on_terminal
from ebbtide.units import Budget

__all__ = ["doctor"]


@with_options()
def doctor(
    *,
    case: CaseName,
    budget: Annotated[
        str | None, typer.Option(help="one to judge: 12GiB, 800MiB, 8GB, or 60% of the unplanned peak")
    ] = None,
    options: Options,
    size: Size = None,
    sizes: Sizes,
    top: Annotated[int, typer.Option(min=1, help="how many places to list by bytes")] = 10,
    as_json: AsJson = False,
) -> None:
    """Capture a training step and tell what was found, without running it.

    Graph breaks; random, opaque and single-run ops; what is changed in place; the largest buffers and those at the
    unplanned peak by module and line; that peak by kind and by type of layer; what pins the floor, and what would lower
    it. With --budget also what a plan within it costs.
    """
    planner = options.planner
    limit = None if budget is None else Budget.parse(budget)
    if limit is None and planner != "auto":
        raise UsageError(
            f"--planner {planner} is judged by a plan within a budget; give --budget 60% besides", argument="planner"
        )
    check_request(case, size, options)
    check_sizes(case, sizes)

    import_large("numpy", "torch")
    from ebbtide._api.doctor import examine
    from ebbtide.planning.pipeline import PlanningOptions
    from ebbtide.report.records.diagnosis import Break, break_of
    from ebbtide.report.text.doctor import write_break, write_findings
    from ebbtide.report.text.progress import ProgressDisplay

    with ProgressDisplay(sys.stderr) as display:
        options = replace(options, progress=display)
        try:
            captured, _ = captured_step(case, size, options, display, sizes)
            found = examine(captured, limit, PlanningOptions.of(options), top)
        except CaptureError as error:
            found = break_of(error)
    if isinstance(found, Break):
        if as_json:
            write_json({"case": case, "captured": False, "breaks": [asdict(found)]})
        else:
            write_break(case, found, on_terminal(sys.stdout))
        raise typer.Exit(2)
    if as_json:
        write_json({**found.to_json(), "captured": True, "breaks": []})
    else:
        write_findings(found, on_terminal(sys.stdout))

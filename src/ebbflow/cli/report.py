"""``ebbflow report``: a saved plan as a page to look at.

With ``--json`` one object: ``case, out, bytes`` and the number of ``ops`` and ``tensors`` that the report has.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ebbflow.cli.arguments import AsJson, PlanFile
from ebbflow.cli.output import check_writable, write_json, written
from ebbflow.cli.plan_files import read_plan

__all__ = ["report"]


def report(
    plan: PlanFile,
    others: Annotated[
        list[str] | None, typer.Argument(help="more plans of the same step, for the frontier", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="the page to write: FILE.html")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write a report of a saved plan: one HTML page that opens without network.

    Memory over the step, every tensor with what the plan does with it and why, what pins the floor, the frontier.
    """
    check_writable(out)
    found = read_plan(Path(plan))
    rest = [read_plan(Path(each)) for each in others or ()]
    with written(out, "--out"):
        found.save_html(out, rest)
    if as_json:
        size = out.stat().st_size
        ops, tensors = len(found.program.ops), len(found.program.buffers)
        write_json({"case": found.case, "out": str(out), "bytes": size, "ops": ops, "tensors": tensors})
    else:
        print(f"report of {found.case} written to {out}", file=sys.stderr)

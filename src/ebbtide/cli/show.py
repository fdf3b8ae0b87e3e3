"""``ebbtide show``: a saved plan as text.

With ``--json`` one object, the plan's summary, as ``ebbtide plan --json`` prints it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.arguments import AsJson, PlanFile
from ebbtide.cli.output import write_json
from ebbtide.cli.plan_files import read_plan
from ebbtide.report.text.terminal import on_terminal

__all__ = ["show"]


def show(
    plan: PlanFile,
    explain: Annotated[
        str | None, typer.Option(help="tell of one tensor instead: its name, op, module path or source line")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a plan that was saved with --out or Plan.save.

    The file is read, checked and simulated anew; nothing in it runs, and no torch is needed.
    """
    found, stream = read_plan(Path(plan)), on_terminal(sys.stdout)
    if explain is not None:
        print(found.explain(explain), file=stream)
        return
    if as_json:
        write_json(found.summary())
        return
    from ebbtide.report.text.plan import write_plan

    print(found, file=stream)
    write_plan(found, stream)

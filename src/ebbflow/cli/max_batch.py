"""``ebbflow max-batch``: the largest batch that fits a budget, by prediction.

With ``--json`` one object: ``case, batch, unplanned_batch, budget_bytes, overhead_limit, captured`` and, under
``plan``, the plan's summary or ``null``.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

import ebbflow
from ebbflow.case import Case
from ebbflow.cli.cases import load_case
from ebbflow.cli.output import write_json
from ebbflow.errors import UsageError
from ebbflow.planning.pipeline import DEFAULT_EFFORT
from ebbflow.report.text.plan import write_plan
from ebbflow.report.text.progress import ProgressDisplay
from ebbflow.units import Budget, format_bytes, format_percent

__all__ = ["max_batch"]


def max_batch(
    case: Annotated[str, typer.Argument(help="zoo:NAME or FILE.py:function; the function takes the batch")],
    budget: Annotated[str, typer.Option(help="peak allowed: 12GiB, 800MiB, 8GB")],
    overhead: Annotated[
        str | None, typer.Option(help="the most added time: one-forward, 30% or 0.3; default: any")
    ] = None,
    planner: Annotated[str, typer.Option(help="name of the planner")] = "auto",
    machine: Annotated[
        str | None, typer.Option(help="of the catalogue, e.g. a100-80gb: an estimate; default: measured here")
    ] = None,
    effort: Annotated[int, typer.Option(min=0, help="local-search moves of the answer's plan")] = DEFAULT_EFFORT,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Find the largest batch whose training step fits a budget, without running it or running out."""
    if case.endswith(".json"):
        raise UsageError(f"{case} has a fixed batch; name zoo:NAME or FILE.py:function, which takes the batch")
    limit = _limit(overhead)

    def make(batch: int) -> Case:
        loaded = load_case(case, batch)
        assert isinstance(loaded, Case)
        return loaded

    with ProgressDisplay(sys.stderr) as display:
        found = ebbflow.max_batch(
            make, budget=budget, overhead=limit, planner=planner, machine=machine, effort=effort, progress=display
        )
    if as_json:
        write_json(
            {
                "case": case,
                "batch": found.batch,
                "unplanned_batch": found.unplanned_batch,
                "budget_bytes": Budget.parse(budget).bytes,
                "overhead_limit": found.overhead_limit,
                "captured": [list(each) for each in found.captured],
                "plan": found.plan.summary() if found.plan is not None else None,
            }
        )
        return
    allowed = (
        "" if found.overhead_limit is None else f" at an overhead of at most {format_percent(found.overhead_limit)}"
    )
    size = format_bytes(Budget.parse(budget).bytes or 0)
    print(f"largest batch of {case} within {size}{allowed}: {found.batch}, unplanned {found.unplanned_batch}")
    if found.plan is not None:
        write_plan(found.plan, sys.stdout)


def _limit(text: str | None) -> float | Literal["one-forward"] | None:
    """The limit on the overhead that ``text`` says."""
    if text is None or text == "one-forward":
        return None if text is None else "one-forward"
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise UsageError(f"--overhead {text!r} is no limit; accepted: one-forward, 30% or 0.3") from None
    if text.endswith("%"):
        return number / 100
    if number > 1:
        raise UsageError(f"--overhead {text} is a fraction of {number:.0%}; write {text}% if that is meant, or 0.3")
    return number

"""``ebbtide report``: a saved plan as a page, a picture, or a file for another tool: the name of the file says which.

With ``--json`` one object: ``case, out, bytes`` and the number of ``ops`` and ``tensors`` that the report has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbtide.cli.arguments import AsJson, PlanFile
from ebbtide.cli.output import PICTURES, check_writable, write_json, written
from ebbtide.cli.plan_files import read_plan
from ebbtide.errors import UsageError

if TYPE_CHECKING:
    from ebbtide.report.plan import Plan

__all__ = ["report"]


def _page(plan: Plan, others: list[Plan], path: Path) -> None:
    plan.save_html(path, others)


def _picture(plan: Plan, others: list[Plan], path: Path) -> None:
    """Memory over the step; of several plans, their frontier."""
    from ebbtide.report.plots.files import save_picture

    save_picture([plan, *others], path)


def _trace(plan: Plan, others: list[Plan], path: Path) -> None:
    _only_one(others, path)
    plan.save_trace(path)


def _snapshot(plan: Plan, others: list[Plan], path: Path) -> None:
    _only_one(others, path)
    plan.save_snapshot(path)


def _only_one(others: list[Plan], path: Path) -> None:
    if others:
        raise UsageError(f"--out {path} holds one plan; name one, or write a page: --out page.html", argument="--out")


_WRITERS: dict[str, Callable[[Plan, list[Plan], Path], None]] = {
    ".html": _page,
    ".htm": _page,
    **dict.fromkeys(PICTURES, _picture),
    ".json": _trace,
    ".pickle": _snapshot,
}
_FORMS = (
    "FILE.html is a page, FILE.png, .svg or .pdf a picture, FILE.json a Chrome trace, FILE.pickle a snapshot for "
    "PyTorch's memory_viz"
)


def report(
    plan: PlanFile,
    others: Annotated[
        list[str] | None, typer.Argument(help="more plans of the same step, for the frontier", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help=f"{_FORMS}")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write a report of a saved plan: one HTML page that opens without network.

    Memory over the step, every tensor with what the plan does with it and why, what pins the floor, the frontier. By
    the name of --out also a picture, or the timeline for Perfetto or PyTorch's memory_viz.
    """
    writer = _WRITERS.get(out.suffix.lower())
    if writer is None:
        raise UsageError(f"--out {out}: {_FORMS}", argument="--out", value=str(out), accepted=tuple(_WRITERS))
    paths = [Path(each) for each in (plan, *(others or ()))]
    if out.exists() and any(path.exists() and path.samefile(out) for path in paths):
        raise UsageError(f"--out {out} is a plan that is read; name another file", argument="--out", value=str(out))
    check_writable(out)
    found, *rest = [read_plan(path) for path in paths]
    with written(out, "--out"):
        writer(found, rest, out)
    if as_json:
        size = out.stat().st_size
        ops, tensors = len(found.program.ops), len(found.program.buffers)
        write_json({"case": found.case, "out": str(out), "bytes": size, "ops": ops, "tensors": tensors})
    else:
        print(f"report of {found.case} written to {out}", file=sys.stderr)

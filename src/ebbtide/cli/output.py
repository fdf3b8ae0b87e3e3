"""What commands write besides text: one JSON object or list last on standard output, and plan files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ebbtide.errors import UsageError

if TYPE_CHECKING:
    from ebbtide.report.plan import Plan
    from ebbtide.report.records.page import Page
    from ebbtide.report.records.points import Measured

__all__ = [
    "PICTURES",
    "check_page",
    "check_picture",
    "check_plan",
    "check_writable",
    "save_frontier",
    "save_plan",
    "save_report",
    "write_json",
    "written",
]


def write_json(data: Mapping[str, object] | Sequence[object]) -> None:
    """Print ``data`` as one line of JSON."""
    print(json.dumps(data), file=sys.stdout, flush=True)


def check_writable(path: Path | None, option: str = "--out") -> None:
    """Refuse an output file that cannot be written, before any work is done.

    Args:
        path: of the file; ``None`` if none was asked for.
        option: that names it.

    Raises:
        UsageError: if ``path`` is a folder, or its folder does not exist or is read-only.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder; name a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {path}: the folder {folder} cannot be written to; name another")


def check_page(path: Path | None) -> None:
    """Refuse a page of ``--report`` that cannot be written, before any work is done.

    Raises:
        UsageError: as :func:`check_writable`, or for another format.
    """
    if path is not None and path.suffix.lower() not in PAGES:
        raise UsageError(
            f"--report {path}: a report is a page, FILE.html; ebbtide report makes pictures and traces of a plan "
            "that --out saves",
            argument="--report",
            value=str(path),
            accepted=PAGES,
        )
    check_writable(path, "--report")


def check_plan(path: Path | None) -> None:
    """Refuse a plan's file that cannot be written, or looks like something else, before any work is done.

    Raises:
        UsageError: as :func:`check_writable`, or for the name of a page or a picture.
    """
    if path is not None and path.suffix.lower() in (*PAGES, *PICTURES):
        raise UsageError(
            f"--out {path}: a plan is saved as JSON, FILE.json; --report FILE.html writes a page",
            argument="--out",
            value=str(path),
        )
    check_writable(path)


PAGES = (".html", ".htm")
"""What a page's file may end with."""
PICTURES = (".png", ".svg", ".pdf")
"""What a picture's file may end with."""


def check_picture(path: Path | None, option: str) -> None:
    """Refuse a picture that cannot be drawn to ``path``, before any work is done.

    Raises:
        UsageError: as :func:`check_writable`; for another format; or without matplotlib, with what to install.
    """
    if path is None:
        return
    if path.suffix.lower() not in PICTURES:
        forms = f"{', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        raise UsageError(
            f"{option} {path}: the name of a picture ends with {forms}", argument=option, accepted=PICTURES
        )
    check_writable(path, option)
    from ebbtide.report.plots.axes import require_matplotlib

    require_matplotlib()


def save_plan(plan: Plan, path: Path | None) -> None:
    """Write ``plan`` to ``path``, if one is given, and say so on standard error.

    Raises:
        UsageError: if the file cannot be written.
    """
    if path is None:
        return
    with written(path, "--out"):
        plan.save(path)
    print(f"plan written to {path}", file=sys.stderr)


def save_report(page: Page, path: Path | None) -> None:
    """Write ``page`` to ``path``, if one is given, and say so on standard error.

    Raises:
        UsageError: if the file cannot be written.
    """
    if path is None:
        return
    from ebbtide.report.html.page import save_page

    with written(path, "--report"):
        save_page(page, path)
    print(f"report written to {path}", file=sys.stderr)


def save_frontier(plans: Sequence[Plan], runs: Sequence[tuple[Plan, Measured]], path: Path | None) -> None:
    """Draw the frontier of ``plans`` to ``path``, if one is given, and say so on standard error.

    Raises:
        UsageError: if the file cannot be written.
    """
    if path is None:
        return
    from ebbtide.report.plots.files import save_picture

    with written(path, "--plot"):
        save_picture(plans, path, runs=runs)
    print(f"frontier drawn to {path}", file=sys.stderr)


@contextmanager
def written(path: Path, option: str) -> Generator[None]:
    """Tells of a file that cannot be written after all.

    Raises:
        UsageError: in place of an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written ({error.strerror}); name another file") from error

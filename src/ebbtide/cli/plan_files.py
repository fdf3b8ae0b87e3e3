"""Plan files that a command is given: read, or refused with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ebbtide.cli.imports import import_large
from ebbtide.errors import UsageError

if TYPE_CHECKING:
    from ebbtide.report.plan import Plan

__all__ = ["read_plan"]

_MAKE = "a plan file is made with `ebbtide plan CASE --budget B --out plan.json` or Plan.save"


def read_plan(path: Path) -> Plan:
    """The plan at ``path``.

    Raises:
        UsageError: if there is no file.
        PlanFileError: if it is damaged or no plan.
        PlanMismatch: if it is of a schema that is not read.
    """
    if path.is_dir() or not path.exists():
        what = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        raise UsageError(f"{what}; {_MAKE}", argument="plan", value=str(path))

    import_large("numpy")
    from ebbtide.report.plan import Plan

    return Plan.load(path)

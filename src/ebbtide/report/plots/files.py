"""Pictures as files, without a window and without pyplot's list of open figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebbtide.report.plots.axes import require_matplotlib
from ebbtide.report.plots.frontier import plot_frontier
from ebbtide.report.plots.plan import plot_plan
from ebbtide.report.records.points import Measured
from ebbtide.step.plan import PlanRecord

__all__ = ["save_picture"]


def save_picture(plans: Sequence[PlanRecord], path: Path, *, runs: Sequence[tuple[PlanRecord, Measured]] = ()) -> None:
    """Draw one plan's memory over the step, or the frontier of several or of runs, to a file.

    Raises:
        UsageError: if matplotlib is not installed, or the plans are of different steps.
        OSError: if the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(9.0, 4.5) if len(plans) == 1 else (6.5, 4.5), layout="constrained")
    if len(plans) == 1 and not runs:
        plot_plan(plans[0], figure.subplots())
    else:
        plot_frontier(plans, figure.subplots(), runs=runs)
    figure.savefig(path, dpi=150)

"""A plan as one picture: memory over the step by category, with the unplanned step as a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ebbtide.report.plots.axes import axes_or_new, bytes_axis
from ebbtide.report.records.course import Course, planned_course, unplanned_course
from ebbtide.report.records.stack import Category, stack_of
from ebbtide.units import format_allowed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ebbtide.step.plan import PlanRecord

__all__ = ["plot_plan"]

COLOURS = {
    Category.RESIDENT: "#c3c9cf",
    Category.KEPT: "#4a76a8",
    Category.BRIEF: "#a5c3e0",
    Category.AGAIN: "#dd8a3e",
    Category.RELOADED: "#a56fa0",
    Category.GRADIENTS: "#3f918c",
    Category.BACKWARD: "#8cc4bd",
    Category.OTHER: "#d9cda5",
}
"""Those of the HTML page (``report/html/page/page.css``)."""


def plot_plan(plan: PlanRecord, ax: Axes | None = None) -> Figure:
    """Draw ``plan`` into ``ax``, or into a new figure.

    Raises:
        UsageError: if matplotlib is not installed, with what to install.
    """
    figure, axes = axes_or_new(ax, (9.0, 4.5))
    course = planned_course(plan)
    by_time = course.moments and course.moments[-1].end_seconds > 0
    edges = _edges(course) if by_time else np.arange(len(course.moments) + 1, dtype=np.float64)
    below = np.zeros(len(course.moments), np.int64)
    for category, size in stack_of(plan.program, course, plan.resident_bytes).items():
        if size.any():
            axes.stairs(
                below + size, edges, baseline=below, fill=True, color=COLOURS[category], label=category.value, lw=0
            )
        below = below + size
    if by_time:
        other = unplanned_course(plan)
        level = plan.resident_bytes + np.array([moment.bytes for moment in other.moments], np.int64)
        axes.stairs(level, _edges(other), baseline=None, color="#5b646d", lw=1.0, label="unplanned")
    if course.boundary < len(course.moments):
        axes.axvline(float(edges[course.boundary]), color="#5b646d", lw=0.8, ls="--", label="end of the forward")
    most = max(plan.predicted_peak_bytes, plan.baseline_peak_bytes if by_time else 0)
    if plan.budget_bytes < 2 * most:  # one far above all else would leave the picture empty
        most = max(most, plan.budget_bytes)
        axes.axhline(plan.budget_bytes, color="#b3401f", lw=1.5, label=f"budget {format_allowed(plan.budget_bytes)}")
    axes.set_ylim(0, 1.06 * most or 1)
    bytes_axis(axes.yaxis, most)
    axes.set_xlabel("seconds, predicted" if by_time else "moments of the step")
    axes.set_ylabel("memory, predicted")
    axes.set_title(f"{plan.case}, planned by {plan.planner}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
    return figure


def _edges(course: Course) -> NDArray[np.float64]:
    """Where each moment begins on the compute lane, and the end; transfers take no time on it."""
    begins: list[float] = []
    now = 0.0
    for moment in course.moments:
        begins.append(now)
        if moment.lane == "compute":
            now = moment.end_seconds
    return np.array([*begins, now])

"""Plans of one step as one picture: peak against added time, with bounds, and what was measured where it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ebbtide.errors import UsageError
from ebbtide.names import with_known_keywords
from ebbtide.report.plots.axes import axes_or_new, bytes_axis
from ebbtide.report.records.points import Measured, Point, points_of
from ebbtide.step.plan import PlanRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_frontier"]


@with_known_keywords
def plot_frontier(
    plans: Sequence[PlanRecord], ax: Axes | None = None, *, runs: Sequence[tuple[PlanRecord, Measured]] = ()
) -> Figure:
    """The frontier of a step: the peak and the added time of each of its plans, a line per planner.

    Args:
        plans: of one step, such as those of :func:`ebbtide.sweep`.
        ax: matplotlib axes to draw into; ``None`` is a new figure.
        runs: what running some of these plans took, each with its plan.

    Raises:
        UsageError: if there is no plan, if they are of different steps, or if matplotlib is not installed.
    """
    found = list(plans)
    for each in found:
        if not isinstance(each, PlanRecord):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"a frontier is of plans, not of {type(each).__name__}", argument="plans", value=each)
    if not found:
        raise UsageError("a frontier needs one plan or more, such as those of ebbtide.sweep", argument="plans")
    points = points_of(found[0], found[1:], runs)
    figure, axes = axes_or_new(ax, (6.5, 4.5))
    for planner in dict.fromkeys(point.planner for point in points if point.planner):
        _planner(axes, [point for point in points if point.planner == planner], planner)
    axes.plot([found[0].baseline_peak_bytes], [0.0], "o", color="#5b646d", label="unplanned", ls="none")
    axes.axvline(found[0].floor_bytes, color="#5b646d", lw=0.8, ls=":", label="proven floor")
    most = max(point.peak_bytes for point in points)
    axes.set_xlim(0, 1.06 * most or 1)
    bytes_axis(axes.xaxis, most)
    axes.set_ylim(bottom=min(0.0, *(100 * (point.measured_overhead or 0.0) for point in points)))
    axes.set_xlabel("peak of the step, resident part included")
    axes.set_ylabel("added time, % of the unplanned step")
    axes.set_title(found[0].case)
    axes.legend(frameon=False, fontsize="small")
    return figure


def _planner(axes: Any, points: Sequence[Point], planner: str) -> None:
    [line] = axes.plot(
        [point.peak_bytes for point in points],
        [100 * point.overhead for point in points],
        "o-",
        ms=4,
        lw=1.2,
        label=f"{planner}, predicted",
    )
    bounds = [(point.peak_bytes, 100 * point.bound) for point in points if point.bound is not None]
    if bounds:
        axes.plot(*zip(*bounds, strict=True), "_", color=line.get_color(), ms=9, label=f"{planner}, bound")
    runs = [
        (point.measured_peak_bytes, 100 * point.measured_overhead)
        for point in points
        if point.measured_peak_bytes is not None and point.measured_overhead is not None
    ]
    if runs:
        axes.plot(*zip(*runs, strict=True), "s", color=line.get_color(), mfc="none", label=f"{planner}, measured")

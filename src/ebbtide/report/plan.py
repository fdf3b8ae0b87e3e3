"""What users hold of a plan: its record, as text, as pages, as traces and as a picture.

The renderers are imported when one is asked for: most plans are run and never printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from ebbtide.files import write_bytes, write_text
from ebbtide.step.plan import PlanRecord, path_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ebbtide.report.records.points import Measured

__all__ = ["Plan"]


@dataclass(frozen=True, repr=False, eq=False)
class Plan(PlanRecord):
    """What to run, what it will take, and how good it is.

    Its attributes are those of :class:`ebbtide.step.plan.PlanRecord`; every plan that users are given is one of these.
    """

    def __repr__(self) -> str:
        from ebbtide.report.text.plan import line_of

        return line_of(self)

    def __str__(self) -> str:
        """Whether the step fits, what that costs and what to try next, in at most three lines."""
        from ebbtide.report.text.verdict import verdict_of

        return "\n".join(verdict_of(self))

    @property
    def details(self) -> str:
        """All numbers of the plan in a stable text form, each with its name."""
        from ebbtide.report.text.plan import text_of

        return text_of(self)

    def _repr_html_(self) -> str:
        """The plan as a table, for notebooks."""
        from ebbtide.report.html.plan import html_of

        return html_of(self)

    def report(self) -> str:
        """The plan as text, with the buffers that are recomputed most and the op at the peak."""
        from ebbtide.report.text.plan import report_of

        return report_of(self)

    def explain(self, tensor: str) -> str:
        """What happens to one buffer: its size, where it is from, when it is made, dropped and made again, and why.

        Args:
            tensor: the name of a buffer or of its op, its op's module path or source line, or part of one of them.

        Raises:
            UsageError: if no buffer matches, with what comes close.
        """
        from ebbtide.report.text.explain import explain

        rewrites = () if self.rewritten is None else tuple(map(str, self.rewritten.rewrites))
        return explain(self.program, self.schedule, self.timeline, tensor, rewrites)

    def save_html(self, path: str | Path, others: Sequence[Plan] = (), measured: Sequence[Measured] = ()) -> Path:
        """Write a report of the plan to ``path``: one HTML page that needs no network and no other file.

        Args:
            path: of the file.
            others: plans of the same step, such as those of :func:`ebbtide.sweep`, for the frontier on the page.
            measured: of runs of the step: ``verify(...).measured``.

        Raises:
            UsageError: for what is not a path, and for plans of another step.
            OSError: if the file cannot be written.
        """
        from ebbtide.report.html.page import save_page
        from ebbtide.report.records.page import page_of

        path = path_of(path, "Plan.save_html")
        save_page(page_of(self, others, measured=measured), path)
        return path

    def save_trace(self, path: str | Path) -> Path:
        """Write the predicted timeline to ``path`` as a Chrome trace (JSON), which Perfetto opens.

        Raises:
            UsageError: for what is not a path.
            OSError: if the file cannot be written.
        """
        from ebbtide.report.traces.chrome import write_trace

        path, stream = path_of(path, "Plan.save_trace"), StringIO()
        write_trace(self, stream)
        write_text(path, stream.getvalue())
        return path

    def save_snapshot(self, path: str | Path) -> Path:
        """Write the predicted timeline to ``path`` as a PyTorch memory snapshot, which ``memory_viz`` opens.

        Raises:
            UsageError: for what is not a path.
            OSError: if the file cannot be written.
        """
        from ebbtide.report.traces.snapshot import write_snapshot

        path, stream = path_of(path, "Plan.save_snapshot"), BytesIO()
        write_snapshot(self, stream)
        write_bytes(path, stream.getvalue())
        return path

    def plot(self, ax: Axes | None = None) -> Figure:
        """Draw memory over the step by category, with the unplanned step as a line. Needs the extra ``plot``.

        Args:
            ax: matplotlib axes to draw into; ``None`` is a new figure.

        Raises:
            UsageError: if matplotlib is not installed, with what to install.
        """
        from ebbtide.report.plots.plan import plot_plan

        return plot_plan(self, ax)

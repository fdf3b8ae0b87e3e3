"""What all plots have in common: where they are drawn, and axes of bytes."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ebbtide.errors import UsageError
from ebbtide.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["axes_or_new", "bytes_axis", "require_matplotlib"]

_PARTS = 6  # of an axis, about


def require_matplotlib() -> None:
    """Refuse to draw without matplotlib.

    Raises:
        UsageError: saying how to install it.
    """
    if find_spec("matplotlib") is None:
        raise UsageError("plots are drawn by matplotlib, which is not installed: pip install matplotlib")


def axes_or_new(ax: Axes | None, inches: tuple[float, float]) -> tuple[Figure, Any]:
    """``ax`` and its figure, or a new figure of pyplot's with one.

    To a strict type checker the axes are anything: matplotlib's own types leave their keywords open.

    Raises:
        UsageError: if matplotlib is not installed, or ``ax`` is no axes.
    """
    require_matplotlib()
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    if ax is None:
        from matplotlib import pyplot

        draw: Any = pyplot
        return draw.subplots(figsize=inches, layout="constrained")
    figure = ax.get_figure() if isinstance(ax, Axes) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if not isinstance(figure, Figure):
        raise UsageError(f"ax is {type(ax).__name__}; give matplotlib axes, or None for a new figure", argument="ax")
    return figure, ax


def bytes_axis(axis: Any, most: int) -> None:
    """Write an axis from 0 to ``most`` bytes in binary units, at powers of two and their multiples."""
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    axis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(max(most, 1) / _PARTS))))
    axis.set_major_formatter(FuncFormatter(_bytes_text))


def _bytes_text(value: float, _: int | None) -> str:
    return format_bytes(round(value)).replace(".00 ", " ")

"""Scatter plots with lines as SVG, written here so that every machine writes the same bytes.

Colours are those of Okabe and Ito (2008), which people who see few colours can tell apart. A reader's dark mode gives
light text; the background is the page's.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Series", "plot"]

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 34, 44
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B8A900")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.g{stroke:#8884;stroke-width:1}.t{font-weight:600}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)


@dataclass(frozen=True)
class Series:
    """Points of one kind.

    Attributes:
        label: in the legend.
        points: what is across and what is up.
        joined: whether a line goes through them.
    """

    label: str
    points: Sequence[tuple[float, float]]
    joined: bool = False


def plot(title: str, across: str, up: str, series: Sequence[Series]) -> str:
    """An SVG of all series, from 0 across and from the lowest value up."""
    points = [point for each in series for point in each.points]
    right = _ceiling(max(x for x, _ in points))
    low, high = min(y for _, y in points), max(y for _, y in points)
    step = _step((high - low) or 0.1)
    bottom, top = math.floor(low / step - 0.2) * step, math.ceil(high / step + 0.2) * step

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + point[0] / right * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point[1] - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)
        return x, y

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>",
        f'<text class="t" x="{LEFT}" y="18">{html.escape(title)}</text>',
    ]
    for count in range(round((top - bottom) / step) + 1):
        value = bottom + count * step
        _, y = place((0, value))
        parts.append(f'<path class="g" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    across_step = _step(right)
    for count in range(int(right / across_step + 1e-9) + 1):
        x, y = place((count * across_step, bottom))
        parts.append(f'<text x="{x:.1f}" y="{y + 17:.1f}" text-anchor="middle">{count * across_step:.4g}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(across)}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{html.escape(up)}</text>'
    )
    for index, each in enumerate(series):
        parts += _drawn(each, COLOURS[index % len(COLOURS)], [place(point) for point in sorted(each.points)])
        y = TOP + 8 + 17 * index
        parts.append(f'<circle cx="{WIDTH - RIGHT - 8}" cy="{y - 4}" r="4" fill="{COLOURS[index % len(COLOURS)]}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT - 18}" y="{y}" text-anchor="end">{html.escape(each.label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(series: Series, colour: str, places: Sequence[tuple[float, float]]) -> list[str]:
    """Marks, over a line where there is one."""
    marks = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
    if not series.joined:
        return marks
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return [f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>', *marks]


def _step(span: float) -> float:
    """A round distance of grid lines, so that some five fit into ``span``."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(power * each for each in (1, 2, 5, 10) if power * each >= span / 5 - 1e-12)


def _ceiling(value: float) -> float:
    step = _step(value)
    return math.ceil(value / step) * step

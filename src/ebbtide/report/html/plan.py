"""A plan as a small picture and a table, for notebooks: no script, no style sheet, so that every notebook shows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from ebbtide.report.records.course import Course, planned_course, unplanned_course
from ebbtide.report.text.plan import facts_of
from ebbtide.step.plan import PlanRecord
from ebbtide.units import format_allowed, format_bytes

__all__ = ["html_of"]

_WIDTH, _HEIGHT = 520, 130  # of what is drawn
_LEFT, _TOP, _BOTTOM, _RIGHT = 76, 18, 34, 12  # around it, for the axes
_COLUMNS = 260  # of the picture: each shows its highest moment
_PARTS = 4  # of an axis, about


def html_of(plan: PlanRecord) -> str:
    """Memory over the step, and the plan's numbers; what comes from the model is escaped."""
    title = escape(f"{plan.case} by {plan.planner}: {plan.status.name}")
    rows = "".join(
        f'<tr><th style="text-align: left">{escape(name)}</th><td style="text-align: left">{escape(text)}</td></tr>'
        for name, text in facts_of(plan)
    )
    table = f'<table><caption title="{escape(plan.status.value)}">{title}</caption><tbody>{rows}</tbody></table>'
    return f"<div>{_picture(plan)}{table}</div>"


def _picture(plan: PlanRecord) -> str:
    planned, unplanned = planned_course(plan), unplanned_course(plan)
    span = max(plan.step_seconds, unplanned.moments[-1].end_seconds if unplanned.moments else 0.0)
    most = max(plan.predicted_peak_bytes, plan.resident_bytes + plan.baseline.above_bytes, 1)
    most = max(most, plan.budget_bytes) if plan.budget_bytes < 2 * most else most
    if not 0 < span:
        return ""

    def height(size: float) -> float:
        return round(_HEIGHT * (1 - size / (1.05 * most)), 1)

    def line(course: Course) -> str:
        tops = [height(plan.resident_bytes + each) for each in _highest(course, span)]
        return " ".join(f"{_WIDTH * at / _COLUMNS:.0f},{top}" for at, top in enumerate(tops))

    end = len(_highest(planned, span)) - 1
    area = f"0,{_HEIGHT} {line(planned)} {_WIDTH * end / _COLUMNS:.0f},{_HEIGHT}"
    told = (
        f"memory over the step: {format_bytes(plan.predicted_peak_bytes)} planned, "
        f"{format_bytes(plan.baseline_peak_bytes)} unplanned, budget {format_allowed(plan.budget_bytes)}"
    )
    budget = height(plan.budget_bytes)
    rule = f'<path d="M0 {budget} H{_WIDTH}" stroke="#b3401f" fill="none"/>' if budget > 0 else ""
    width, height_of_all = _LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + _BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height_of_all}" role="img" '
        f'font-family="sans-serif" font-size="11" fill="#808a94"><title>{escape(told)}</title>'
        f'<g transform="translate({_LEFT} {_TOP})">'
        f'<polygon points="{area}" fill="#4a76a8" fill-opacity="0.55"/>'
        f'<polyline points="{line(unplanned)}" fill="none" stroke="#808a94"/>{rule}'
        f'<path d="M0 0 V{_HEIGHT} H{_WIDTH}" stroke="#808a94" fill="none"/>'
        f"{_bytes_axis(most, height)}{_time_axis(span)}"
        f'<text x="4" y="-6"><tspan fill="#4a76a8">planned</tspan>, unplanned'
        + (', <tspan fill="#b3401f">budget</tspan>' if rule else "")
        + "; memory, predicted, over the step</text></g></svg>"
    )


def _bytes_axis(most: int, height: Callable[[float], float]) -> str:
    """Sizes at powers of two and their multiples."""
    each = 2 ** math.ceil(math.log2(most / _PARTS)) if most > _PARTS else 1
    return "".join(
        f'<text x="-6" y="{height(size) + 4:.1f}" text-anchor="end">{format_bytes(size).replace(".00 ", " ")}</text>'
        for size in range(0, most + 1, each)
    )


def _time_axis(span: float) -> str:
    """Seconds at round numbers."""
    power = 10.0 ** math.floor(math.log10(span / _PARTS))
    each = next(power * by for by in (1, 2, 5, 10) if power * by * _PARTS >= span)
    unit, name = next(((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms")) if each >= unit), (1e-6, "us"))
    return "".join(
        f'<text x="{_WIDTH * index * each / span:.0f}" y="{_HEIGHT + 15}" text-anchor="middle">'
        f"{round(index * each / unit)} {name}</text>"
        for index in range(int(span / each) + 1)
    )


def _highest(course: Course, span: float) -> list[int]:
    """Per column up to the course's end the most bytes in it, or what was there before."""
    found = [-1] * (_COLUMNS + 1)
    last, now = 0, 0.0
    for moment in course.moments:
        begin, now = now, moment.end_seconds if moment.lane == "compute" else now
        last = min(int(_COLUMNS * (now / span)), _COLUMNS)
        for column in range(min(int(_COLUMNS * (begin / span)), _COLUMNS), last + 1):
            found[column] = max(found[column], moment.bytes)
    return [max(each, 0) for each in found[: last + 1]]

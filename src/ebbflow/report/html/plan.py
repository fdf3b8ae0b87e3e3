"""A plan as a small table, for notebooks."""

from __future__ import annotations

from html import escape

from ebbflow.report.text.plan import facts_of
from ebbflow.step.plan import Plan

__all__ = ["html_of"]


def html_of(plan: Plan) -> str:
    """One table without script or style sheet; what comes from the model is escaped."""
    title = escape(f"{plan.case} by {plan.planner}: {plan.status.name}")
    rows = "".join(
        f'<tr><th style="text-align: left">{escape(name)}</th><td style="text-align: left">{escape(text)}</td></tr>'
        for name, text in facts_of(plan)
    )
    return f'<table><caption title="{escape(plan.status.value)}">{title}</caption><tbody>{rows}</tbody></table>'

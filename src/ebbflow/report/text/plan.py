"""A plan as text for people: in one line, in its stable form, as a report, and with where its numbers are from."""

from __future__ import annotations

from typing import TextIO

from ebbflow.step.plan import Plan
from ebbflow.step.provenance import Costs
from ebbflow.step.schedule import Compute
from ebbflow.units import format_bytes, format_percent, format_seconds

__all__ = ["facts_of", "line_of", "report_of", "text_of", "write_plan"]

_RANKED = 5  # ops whose reruns take most are listed


def line_of(plan: Plan) -> str:
    """The plan in one line: what a debugger shows."""
    return (
        f"<Plan of {plan.case} by {plan.planner}: peak {format_bytes(plan.predicted_peak_bytes)} of "
        f"{format_bytes(plan.budget_bytes)}, overhead {format_percent(plan.overhead)}, {plan.status.name}>"
    )


def text_of(plan: Plan) -> str:
    """The plan in a stable text form: what ``str`` gives."""
    lines = [f"plan for {plan.case} by {plan.planner}: {plan.status.name}"]
    return "\n".join([*lines, *(_fact(name, text) for name, text in facts_of(plan))])


def facts_of(plan: Plan) -> list[tuple[str, str]]:
    """The plan's numbers, each with its name."""
    share = plan.predicted_peak_bytes / plan.baseline_peak_bytes if plan.baseline_peak_bytes else 0.0
    again = sum(int(n) - 1 for n in plan.timeline.runs if n > 1)
    bound = "none" if plan.bound is None else f"{format_percent(plan.bound)} ({plan.bound_class})"
    gap = "" if plan.gap is None else f", gap {format_percent(plan.gap)}"
    ops = plan.program.ops
    pin = ops[plan.floor_op] if 0 <= plan.floor_op < len(ops) else "nothing"
    return [
        ("budget", format_bytes(plan.budget_bytes)),
        (
            "peak",
            f"{format_bytes(plan.predicted_peak_bytes)} predicted, {format_percent(share)} of the unplanned "
            f"{format_bytes(plan.baseline_peak_bytes)}",
        ),
        ("resident", f"{format_bytes(plan.resident_bytes)}, reserve {format_bytes(plan.reserve_bytes)}"),
        (
            "overhead",
            f"{format_percent(plan.overhead)} predicted ({format_seconds(plan.step_seconds)} against "
            f"{format_seconds(plan.baseline_seconds)}), bound {bound}{gap}",
        ),
        ("reruns", f"{again} of {len(ops)} ops"),
        ("smallest", f"{format_bytes(plan.smallest_bytes)}, floor {format_bytes(plan.floor_bytes)} pinned by {pin}"),
    ]


def report_of(plan: Plan) -> str:
    """The stable form with the op at the peak and the ops whose reruns take most."""
    ops, runs = plan.program.ops, plan.timeline.runs
    lines = [text_of(plan)]
    action = plan.schedule.actions[plan.timeline.peak_action] if plan.schedule.actions else None
    if isinstance(action, Compute):
        lines.append(_fact("peak at", str(ops[action.op])))
    ranked = sorted(range(len(ops)), key=lambda i: -(int(runs[i]) - 1) * ops[i].seconds)
    for index in ranked[:_RANKED]:
        extra = int(runs[index]) - 1
        if extra > 0:
            lines.append(_fact("rerun", f"{extra}x {ops[index]}: {format_seconds(extra * ops[index].seconds)}"))
    return "\n".join(lines)


def write_plan(plan: Plan, stream: TextIO) -> None:
    """Write the report of ``plan`` to ``stream``, what its status means and where its numbers are from."""
    source = plan.provenance
    print(report_of(plan), file=stream)
    print(_fact("status", plan.status.value), file=stream)
    if source.costs is not None:
        print(_fact("costs", f"{source.costs.value} for {source.machine or 'this machine'}{_kit(plan)}"), file=stream)
    if source.memory_bytes is not None:
        print(_fact("memory", _room(plan, source.memory_bytes)), file=stream)
    for name, text in (("estimate", source.estimate), ("mapped", source.mapped), ("workspace", source.workspace)):
        if text:
            print(_fact(name, text), file=stream)


def _fact(name: str, text: str) -> str:
    return f"  {name:<10} {text}"


def _room(plan: Plan, has_bytes: int) -> str:
    """Whether the machine planned for holds the plan's peak: a budget may be larger than it."""
    spare = has_bytes - plan.predicted_peak_bytes
    if spare < 0:
        return f"{plan.provenance.machine} has {format_bytes(has_bytes)}: this plan does NOT fit it"
    return f"{plan.provenance.machine} has {format_bytes(has_bytes)}, {format_bytes(spare)} more than the peak"


def _kit(plan: Plan) -> str:
    """What measured costs depend on; a roofline depends on the machine alone."""
    source = plan.provenance
    if source.costs is Costs.ROOFLINE:
        return ""
    facts = [f"torch {source.torch}"] if source.torch else []
    facts += [f"threads {source.threads}"] if source.threads is not None else []
    return f" ({', '.join(facts)})" if facts else ""

"""A plan as text for people: in one line, in its stable form, as a report, and with where its numbers are from."""

from __future__ import annotations

from typing import TextIO

from ebbtide.planners.base import AS_CAPTURED
from ebbtide.report.records.resident import UNKNOWN, resident_of
from ebbtide.step.machine import Machine, is_elsewhere
from ebbtide.step.plan import PlanRecord
from ebbtide.step.provenance import NOT_KNOWN, Costs, LossPlace, Provenance
from ebbtide.step.rewrite import in_words
from ebbtide.step.schedule import Compute, Offload, Reload
from ebbtide.units import (
    format_allowed,
    format_bytes,
    format_count,
    format_gap,
    format_percent,
    format_seconds,
    format_share,
)

__all__ = [
    "counted_of",
    "facts_of",
    "line_of",
    "moves_of",
    "origins_of",
    "report_of",
    "rewrites_of",
    "room_of",
    "starting_of",
    "text_of",
    "write_plan",
]

_RANKED = 5  # ops whose reruns take most are listed


def line_of(plan: PlanRecord) -> str:
    """The plan in one line: what a debugger shows."""
    return (
        f"<Plan of {plan.case} by {plan.planner}: peak {format_bytes(plan.predicted_peak_bytes)} of "
        f"{format_allowed(plan.budget_bytes)}, overhead {format_percent(plan.overhead)}, {plan.status.name}>"
    )


def text_of(plan: PlanRecord) -> str:
    """The plan in a stable text form: its ``details``."""
    lines = [f"plan for {plan.case} by {plan.planner}: {plan.status.name}"]
    return "\n".join([*lines, *(_fact(name, text) for name, text in facts_of(plan))])


def facts_of(plan: PlanRecord) -> list[tuple[str, str]]:
    """The plan's numbers, each with its name."""
    again = sum(int(n) - 1 for n in plan.timeline.runs if n > 1)
    bound = "none" if plan.bound is None else f"{format_percent(plan.bound)} ({plan.bound_class})"
    gap = "" if plan.gap is None else f", gap {format_gap(plan.gap)}"
    ops = plan.program.ops
    pin = ops[plan.floor_op] if 0 <= plan.floor_op < len(ops) else "nothing"
    return [
        ("budget", format_allowed(plan.budget_bytes) + _share_of(plan.provenance)),
        (
            "peak",
            f"{format_bytes(plan.predicted_peak_bytes)} predicted, "
            f"{format_share(plan.predicted_peak_bytes, plan.baseline_peak_bytes)} of the unplanned "
            f"{format_bytes(plan.baseline_peak_bytes)}{_without_checkpoints(plan.provenance)}",
        ),
        ("resident", f"{format_bytes(plan.resident_bytes)}, reserve {format_bytes(plan.reserve_bytes)}"),
        ("counted", counted_of(plan.provenance, with_user_window=plan.program.between_bytes > 0)),
        *([("loss", _OUTSIDE)] if plan.provenance.loss is LossPlace.OUTSIDE else []),
        *([("offloaded", plan.provenance.offloaded)] if plan.provenance.offloaded else []),
        (
            "overhead",
            f"{format_percent(plan.overhead)} predicted ({format_seconds(plan.step_seconds)} against "
            f"{format_seconds(plan.baseline_seconds)})",
        ),
        ("bound", f"{bound}{gap}"),
        ("reruns", f"{again} of {format_count(len(ops), 'op')}"),
        *(("rewritten", text) for text in rewrites_of(plan)),
        *(("moves", text) for text in moves_of(plan)),
        *([("chosen", plan.provenance.notes["chosen"])] if "chosen" in plan.provenance.notes else []),
        ("smallest", f"{format_bytes(plan.smallest_bytes)}, {_SMALLEST[plan.smallest_is_searched]}"),
        ("floor", f"{format_bytes(plan.floor_bytes)} of any budget with {AS_CAPTURED}, pinned by {pin}"),
    ]


_SMALLEST = {
    True: "the least budget for which a plan was found",
    False: "what this plan needs: no smaller one was looked for yet",
}
_OUTSIDE = (
    "outside the model: the gradients of what it returns count in full, what the loss takes is measured in fit's first "
    "step; returned by the forward it takes less"
)


def _share_of(source: Provenance) -> str:
    """That a budget is a share of more than the unplanned peak, which no step needs; empty if it is not."""
    share = source.notes.get("share")
    return f": {share} of the unplanned peak, more than the unplanned step takes" if share else ""


def _without_checkpoints(source: Provenance) -> str:
    """Which peak shares are of where the model has checkpoints; empty if it has none."""
    return ", which keeps what the model's checkpoints drop" if "checkpoints" in source.notes else ""


def _kinds(plan: PlanRecord) -> str:
    """What is resident by kind; empty where that is not known."""
    return ", ".join(f"{format_bytes(size)} {kind}" for kind, size in resident_of(plan).items() if kind != UNKNOWN)


def rewrites_of(plan: PlanRecord) -> list[str]:
    """What takes the place of parts of the captured step, and what it rests on."""
    if plan.rewritten is None:
        return []
    assumed = is_elsewhere(plan.machine)
    rests = "takes for granted, until fit measures it," if assumed else "rests on what was measured here:"
    rewrites = plan.rewritten.rewrites
    many = [each for each in rewrites if "places" in dict(each.settings)]
    one_by_one = [each for each in rewrites if each not in many]
    lines = [f"{each}; {rests} {', '.join(each.facts)}" if each.facts else str(each) for each in one_by_one]
    if many:
        facts = dict.fromkeys(fact for each in many for fact in each.facts)
        lines.append(f"{'; '.join(in_words(many))}; {rests} {', '.join(facts)}")
    return lines


def moves_of(plan: PlanRecord) -> list[str]:
    """Per tier what moves, and for all of them what that takes; nothing where the plan may not move anything."""
    if not plan.tiers:
        return []
    sizes = [buffer.bytes for buffer in plan.program.buffers]
    tier_of = {action.buffer: action.tier for action in plan.schedule.actions if isinstance(action, Offload)}
    if not tier_of:
        return [f"nothing to {' or '.join(plan.tiers)}"]
    back = [action.buffer for action in plan.schedule.actions if isinstance(action, Reload)]
    lines: list[str] = []
    for tier in dict.fromkeys(tier_of.values()):
        out = [b for b, to in tier_of.items() if to == tier]
        again = [b for b in back if tier_of[b] == tier]
        lines.append(
            f"{format_bytes(sum(sizes[b] for b in out))} to the {tier} in {format_count(len(out), 'buffer')}, "
            f"{format_bytes(sum(sizes[b] for b in again))} back in {format_count(len(again), 'reload')}"
        )
    timeline = plan.timeline
    lines.append(
        f"{format_seconds(timeline.transfer_seconds)} of transfers predicted, "
        f"{format_seconds(timeline.waited_seconds)} waited for, {format_percent(timeline.hidden_share)} hidden"
    )
    return lines


def report_of(plan: PlanRecord) -> str:
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


def write_plan(plan: PlanRecord, stream: TextIO) -> None:
    """Write the report of ``plan`` to ``stream``, what its status means and where its numbers are from."""
    source = plan.provenance
    print(report_of(plan), file=stream)
    if kinds := _kinds(plan):
        print(_fact("resident", kinds), file=stream)
    print(_fact("status", plan.status.value), file=stream)
    if source.costs is not None:
        print(_fact("costs", f"{source.costs.value} for {source.machine or 'this machine'}{_kit(plan)}"), file=stream)
    if note := starting_of(len(plan.program.ops), plan.program.seconds, plan.machine):
        print(_fact("small step", note), file=stream)
    if source.memory_bytes is not None:
        print(_fact("memory", room_of(source, plan.predicted_peak_bytes)), file=stream)
    for name, text in origins_of(source):
        print(_fact(name, text), file=stream)


def origins_of(source: Provenance) -> list[tuple[str, str]]:
    """What is not as on the machine at hand, each with its name."""
    facts = [("usable", source.usable), ("estimate", source.estimate)]
    facts += [("mapped", source.mapped), ("workspace", source.workspace)]
    return [(name, text) for name, text in facts if text]


def counted_of(source: Provenance, *, with_user_window: bool = False) -> str:
    """What is in a plan's bytes and what is not.

    Args:
        source: of the plan.
        with_user_window: whether what user code takes between forward and backward is known and planned for.
    """
    if not source.device:
        return "what the ops of the graph make; not parameters, inputs and optimizer, of which the graph says nothing"
    counted = ["parameters, buffers, gradients, arguments"]
    if source.device == "cuda" and source.machine == "cuda":
        counted = ["all that the allocator has handed out"]
    missing: list[str] = []
    if source.optimizer:
        counted.append(f"state of {source.optimizer}" + (" at its step" if source.offloaded else ""))
    else:
        missing.append("optimizer state (none was given)")
    if with_user_window:
        counted.append("what user code takes between forward and backward")
    if source.loss is LossPlace.OUTSIDE:
        missing.append("the loss, which is outside the model")
    taken = source.optimizer_step
    stepped = "what optimizer.step() takes while it runs"
    if source.offloaded or (taken and taken != NOT_KNOWN):
        counted.append(stepped)
    else:
        missing.append(f"{stepped}, which cannot be found out" if taken else stepped)
    if not missing:
        return ", ".join(counted)
    return f"{', '.join(counted)}; not {', '.join(missing)}"


_MUCH = 0.5


def starting_of(ops: int, seconds: float, machine: Machine | None) -> str:
    """That of a small step on a card most of the predicted time is the least that an op takes; empty if it is not."""
    if machine is None or not is_elsewhere(machine) or not seconds:
        return ""
    share = ops * machine.launch_seconds / seconds
    if share < _MUCH:
        return ""
    return (
        f"{format_percent(min(share, 1.0))} of the step's time is what starting {format_count(ops, 'op')} "
        f"takes ({format_seconds(machine.launch_seconds)} each): percentages of time say little of a step this small"
    )


def _fact(name: str, text: str) -> str:
    return f"  {name:<10} {text}"


def room_of(source: Provenance, peak_bytes: int) -> str:
    """Whether the machine planned for holds a peak: a budget may be larger than what is usable of it."""
    assert source.memory_bytes is not None
    usable_bytes = source.memory_bytes if source.usable_bytes is None else source.usable_bytes
    has = f"{source.machine} has {format_allowed(source.memory_bytes)}, {format_allowed(usable_bytes)} usable"
    spare = usable_bytes - peak_bytes
    return f"{has}: this does NOT fit it" if spare < 0 else f"{has}, {format_allowed(spare)} more than the peak"


def _kit(plan: PlanRecord) -> str:
    """What measured costs depend on; a roofline depends on the machine alone."""
    source = plan.provenance
    if source.costs is Costs.ROOFLINE:
        return ""
    facts = [f"torch {source.torch}"] if source.torch else []
    facts += [f"threads {source.threads}"] if source.threads is not None else []
    return f" ({', '.join(facts)})" if facts else ""

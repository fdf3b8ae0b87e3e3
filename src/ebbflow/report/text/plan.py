"""A plan as text for people: the plan's own report, what its status means and where its numbers are from."""

from __future__ import annotations

from typing import TextIO

from ebbflow.step.plan import Plan
from ebbflow.units import format_bytes

__all__ = ["write_plan"]


def write_plan(plan: Plan, stream: TextIO) -> None:
    """Write ``plan`` to ``stream``, ending in a line feed."""
    facts = plan.provenance
    print(plan.report(), file=stream)
    print(f"  status     {plan.status.value}", file=stream)
    if "costs" in facts:
        print(f"  costs      {facts['costs']} for {facts.get('machine', 'this machine')}{_kit(plan)}", file=stream)
    if "memory_bytes" in facts:
        print(f"  memory     {_room(plan)}", file=stream)
    for key in ("estimate", "mapped", "workspace"):
        if key in facts:
            print(f"  {key:<10} {facts[key]}", file=stream)


def _room(plan: Plan) -> str:
    """Whether the machine planned for holds the plan's peak: a budget may be larger than it."""
    has = int(plan.provenance["memory_bytes"])
    spare = has - plan.predicted_peak_bytes
    if spare < 0:
        return f"{plan.provenance['machine']} has {format_bytes(has)}: this plan does NOT fit it"
    return f"{plan.provenance['machine']} has {format_bytes(has)}, {format_bytes(spare)} more than the peak"


def _kit(plan: Plan) -> str:
    """What measured costs depend on; a roofline depends on the machine alone."""
    if plan.provenance["costs"] != "measured":
        return ""
    facts = [f"{key} {plan.provenance[key]}" for key in ("torch", "threads") if key in plan.provenance]
    return f" ({', '.join(facts)})" if facts else ""

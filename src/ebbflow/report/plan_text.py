"""A plan as text for people: the plan's own report, what its status means and where its numbers are from."""

from __future__ import annotations

from typing import TextIO

from ebbflow.plan import Plan

__all__ = ["write_plan"]


def write_plan(plan: Plan, stream: TextIO) -> None:
    """Write ``plan`` to ``stream``, ending in a line feed."""
    facts = plan.provenance
    print(plan.report(), file=stream)
    print(f"  status     {plan.status.value}", file=stream)
    if "costs" in facts:
        print(f"  costs      {facts['costs']} for {facts.get('machine', 'this machine')}{_kit(plan)}", file=stream)
    for key in ("estimate", "mapped", "workspaces"):
        if key in facts:
            print(f"  {key:<10} {facts[key]}", file=stream)


def _kit(plan: Plan) -> str:
    """What measured costs depend on; a roofline depends on the machine alone."""
    if plan.provenance["costs"] != "measured":
        return ""
    facts = [f"{key} {plan.provenance[key]}" for key in ("torch", "threads") if key in plan.provenance]
    return f" ({', '.join(facts)})" if facts else ""

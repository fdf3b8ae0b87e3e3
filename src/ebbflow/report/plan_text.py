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
        where = facts.get("machine", facts.get("device", "this machine"))
        kit = ", ".join(f"{key} {facts[key]}" for key in ("torch", "threads") if key in facts)
        print(f"  costs      {facts['costs']} for {where}{f' ({kit})' if kit else ''}", file=stream)
    if "estimate" in facts:
        print(f"  estimate   {facts['estimate']}", file=stream)

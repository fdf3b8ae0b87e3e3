"""What is resident before a step, by kind."""

from __future__ import annotations

from collections.abc import Mapping

from ebbtide.step.plan import PlanRecord

__all__ = ["UNKNOWN", "resident_of"]

UNKNOWN = "resident before the step"


def resident_of(plan: PlanRecord) -> Mapping[str, int]:
    """Bytes by kind, the largest first; all of one kind where no kinds are known that add up to the plan's bytes.

    They do not where a plan has been moved to a call with more or less resident than the one that it was made for.
    """
    parts = {kind: size for kind, size in plan.resident_parts.items() if size > 0}
    if sum(parts.values()) != plan.resident_bytes:
        parts = {UNKNOWN: plan.resident_bytes} if plan.resident_bytes else {}
    return dict(sorted(parts.items(), key=lambda part: (-part[1], part[0])))

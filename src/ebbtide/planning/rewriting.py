"""Which rewrites of a step would lower its floor, at what cost, and why others are skipped: for the doctor.

Of the alternatives to a program that rewrite the same places in the same forms, with slices of other sizes, one is
told: the one of the least floor. One whose floor is above that of the captured program lowers nothing and is not.
"""

from __future__ import annotations

from collections.abc import Iterable

from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planning.alternatives import Alternative
from ebbtide.report.records.rewriting import Rewriting
from ebbtide.step.program import Program
from ebbtide.step.rewrite import in_words

__all__ = ["rewritings"]


def rewritings(
    program: Program, alternatives: Iterable[Alternative], skipped: Iterable[tuple[str, str]], held_bytes: int
) -> tuple[Rewriting, ...]:
    """All of them, the least floors first.

    Args:
        program: as captured, with costs.
        alternatives: to it.
        skipped: where something looks as if it could be rewritten, and why it is left.
        held_bytes: of any budget, besides what the step adds.
    """
    least: dict[tuple[object, ...], tuple[int, Alternative]] = {}
    own = held_bytes + floor_bytes(program)[0]
    for each in alternatives:
        kind = tuple((one.rule, one.at, one.form) for one in each.rewrites)
        floor = held_bytes + floor_bytes(each.estimated)[0]
        if floor <= own and (kind not in least or floor < least[kind][0]):
            least[kind] = floor, each
    found = [
        Rewriting("; ".join(in_words(each.rewrites)), floor, each.estimated.seconds - program.seconds, each.why_not())
        for floor, each in sorted(least.values(), key=lambda entry: entry[0])
    ]
    return (*found, *(Rewriting(where, None, None, why) for where, why in skipped))

"""What every budget of a step has to hold before the step begins, by kind: for refusals, and for the doctor.

Kinds are words, each with bytes of its own. They add up to what is resident: what is not known by kind is a kind, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from ebbtide.units import format_bytes

__all__ = ["OPTIMIZER_STATE", "OTHER", "RESERVE", "WEIGHTS", "parts_in_words", "parts_of"]

WEIGHTS = "weights"
OPTIMIZER_STATE = "optimizer state"

OTHER = "other tensors"
"""Of no kind that is known: another model's, say, on a card, whose allocator counts all that there is."""
RESERVE = "kept in reserve"


def parts_of(parts: Mapping[str, int], resident_bytes: int, reserve_bytes: int = 0) -> dict[str, int]:
    """``parts`` that there are, the largest first, the rest of what is resident behind them, the reserve last.

    Where the parts come to more than all that is resident, as those of a plan may that has moved to another call,
    nothing is known by kind.
    """
    known = {kind: size for kind, size in parts.items() if size > 0}
    rest = resident_bytes - sum(known.values())
    if rest < 0:
        known, rest = {}, resident_bytes
    found = dict(sorted(known.items(), key=lambda part: (-part[1], part[0])))
    for kind, size in ((OTHER, rest), (RESERVE, reserve_bytes)):
        if size > 0:
            found[kind] = found.get(kind, 0) + size
    return found


def parts_in_words(parts: Mapping[str, int]) -> str:
    """``"1.50 KiB (1536 bytes) weights, 512 B (512 bytes) kept in reserve"``."""
    return ", ".join(f"{_both(size)} {kind}" for kind, size in parts.items())


def _both(size: int) -> str:
    return f"{format_bytes(size)} ({size} bytes)"

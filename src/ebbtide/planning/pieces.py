"""A schedule for a step of several pieces: one of the stitched program whose reruns are all at home.

Planners know nothing of windows (``step.pieces``, definition 6). What they find is brought home, which keeps what a
rerun reads for longer; where that takes it above the budget, a schedule for less is asked for, and ever less.
"""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.step.legality import check
from ebbtide.step.pieces import Stitched
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate

__all__ = ["schedule_at_home"]

ROUNDS = 6
"""Of asking; on the models that were tried the first or second answer fits most often."""


def schedule_at_home(
    stitched: Stitched, budget_bytes: int, answer: Callable[[int], Schedule | None]
) -> Schedule | None:
    """A schedule within ``budget_bytes`` above the step's start that every piece can run its own part of.

    Args:
        stitched: the step.
        budget_bytes: above what is resident.
        answer: a schedule of the stitched program within so many bytes, or ``None``.

    Returns:
        The schedule, legal and with its reruns at home; ``None`` if none was found.
    """
    asked, less = budget_bytes, 0
    for _ in range(ROUNDS):
        found = answer(asked)
        if found is None:
            return None
        home = Schedule.from_computes(stitched.program, stitched.at_home(found.computes))
        over_bytes = simulate(stitched.program, home).above_bytes - budget_bytes
        if over_bytes <= 0 and not check(stitched.program, home):
            return home
        less = max(over_bytes, 2 * less, 1)
        asked -= less
    return None

"""``budget="auto"``: what the machine has, less what the allocator and the device's context need."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ebbtide.errors import UsageError
from ebbtide.step.machine import Machine, is_elsewhere
from ebbtide.units import Budget, format_allowed

__all__ = ["AUTO", "budget_from"]

AUTO = "auto"
_logger = logging.getLogger("ebbtide")


def budget_from(value: str | int | Budget, roots: Iterable[object] = (), machine: Machine | None = None) -> Budget:
    """The budget that ``value`` says; for ``"auto"`` what can be used of a machine of the catalogue, or of a card here.

    Args:
        value: as users give it.
        roots: what is on the device at hand, a model; none where no card here is meant.
        machine: planned for; ``None`` is the device at hand.

    Raises:
        UsageError: if it says none, or ``"auto"`` where nobody knows what may be used.
    """
    if value != AUTO:
        return Budget.parse(value)
    if machine is not None and is_elsewhere(machine):
        return Budget(bytes=machine.usable_bytes)
    usable = _usable_here(roots)
    if usable is None:
        raise UsageError(
            'give a budget: bytes, budget="8GiB", or a share of the unplanned peak, budget="60%". Without one it is '
            "what the model's card has free, which on a CPU is anybody's, or what a machine planned for has usable, "
            'machine="rtx4090-24gb"',
            argument="budget",
            value=value,
        )
    _logger.warning("the budget is %s: what the card has free, less 5 %% for fragments", format_allowed(usable))
    return Budget(bytes=usable)


def _usable_here(roots: Iterable[object]) -> int | None:
    if not (found := list(roots)):
        return None
    from ebbtide.measurement.reserved import usable_of_the_card  # imports torch

    return usable_of_the_card(found)

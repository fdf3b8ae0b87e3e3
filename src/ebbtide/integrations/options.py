"""What the callbacks of all trainers take: a budget, and the options of ``fit`` but the optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ebbtide._api.fit import fit
from ebbtide.errors import UnknownArgument, UsageError
from ebbtide.names import did_you_mean
from ebbtide.report.plan import Plan
from ebbtide.units import Budget

__all__ = ["check"]


def check(budget: str | int | Budget | Plan, options: Mapping[str, Any]) -> None:
    """Refuse a budget that is none, an ``optimizer``, which is the trainer's, and options that there are not.

    Raises:
        UsageError: naming it, and what is taken.
    """
    if not isinstance(budget, Plan):
        Budget.parse(budget)
    if "optimizer" in options:
        raise UsageError(
            "MemoryBudget takes no optimizer: it asks the trainer for its own",
            argument="optimizer",
            value=options["optimizer"],
        )
    known = [each for each in inspect.signature(fit).parameters if each not in ("model", "budget", "optimizer")]
    for each in options:
        if each not in known:
            raise UnknownArgument(
                f"MemoryBudget has no option {each!r}; it has those of fit: {', '.join(known)}"
                f"{did_you_mean(each, known)}",
                argument=each,
                value=options[each],
                accepted=known,
            )

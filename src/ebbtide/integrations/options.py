"""What the callbacks of all trainers take: a budget, and the options of ``fit`` but the optimizer."""

from __future__ import annotations

from functools import partial

from ebbtide._api.auto_budget import AUTO
from ebbtide.entry_points import FIELDS, options_of, refuse_unknown
from ebbtide.names import with_known_keywords
from ebbtide.options import Options
from ebbtide.report.plan import Plan
from ebbtide.units import Budget

__all__ = ["checked", "initialized_with_options"]

CALLBACK = "MemoryBudget"
initialized_with_options = partial(with_known_keywords, name=CALLBACK, near=FIELDS, otherwise=refuse_unknown)
"""A callback's ``__init__``, which says of an option that is given by name where it goes."""


def checked(budget: str | int | Budget | Plan, options: Options | None) -> Options:
    """The options of a callback.

    Raises:
        UsageError: for a budget that is none, and options that it does not take.
    """
    if budget != AUTO and not isinstance(budget, Plan):
        Budget.parse(budget)
    return options_of(CALLBACK, options)

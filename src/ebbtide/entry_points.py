"""How the functions that plan take :class:`~ebbtide.options.Options`: the same everywhere, and once each.

1. What is special to a function it takes by name; all else are fields of ``options=ebbtide.Options(...)``.
2. A field that is given by name besides is given once: in both places it is refused.
3. A field that a function has no use for is refused with the reason (:data:`NOT_TAKEN`).
4. A field that is given by name to a function that has it among its options is refused with the call that would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from ebbtide.checks import shown
from ebbtide.errors import UnknownArgument, UsageError
from ebbtide.names import with_known_keywords
from ebbtide.options import Options

__all__ = ["FIELDS", "NOT_TAKEN", "options_of", "refuse_unknown", "takes_options"]

FIELDS = tuple(each.name for each in fields(Options))
"""The names of all options."""
_HERE = "the step is planned for the device that the model is on; leave it out, or plan ahead with ebbtide.plan"
_ANEW = "its plans start from none that is given; ebbtide.fit takes one"
_RUNS_NOTHING = "it runs no step that could go over its budget; ebbtide.fit takes one"
_AHEAD = {"start": _ANEW, "on_violation": _RUNS_NOTHING}
_MADE = "it runs a plan that is made already"
_FITTING = {
    "loss": "the training loop calls it on what the model returns, and what it takes there is measured in the first "
    "step. Put the loss into the model's forward for the best plans; ebbtide.plan(..., loss=...) plans that "
    "step, with the loss in it",
    "machine": _HERE,
    "interrupt": "a first call plans in the training loop; time_limit= ends that after so many seconds",
}
NOT_TAKEN: dict[str, dict[str, str]] = {
    "fit": _FITTING,
    "MemoryBudget": {**_FITTING, "optimizer": "it asks the trainer for its own"},
    "plan": _AHEAD,
    "sweep": {**_AHEAD, "planner": 'give planners=("auto",), one or more'},
    "doctor": _AHEAD,
    "max_batch": _AHEAD,
    "verify": dict.fromkeys((each for each in FIELDS if each not in ("gradients", "tiers")), _MADE),
}
"""Which options a function does not take, and why (definition 3)."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes_options(function: _Function) -> _Function:
    """``function``, which refuses keywords that it does not have, and says of an option where it goes."""
    return with_known_keywords(function, near=FIELDS, otherwise=refuse_unknown)


def refuse_unknown(caller: str, unknown: Mapping[str, Any]) -> None:
    """Refuse options that were given by name to a function that has them in ``options=`` (definitions 3 and 4).

    Args:
        caller: the function's name.
        unknown: the keywords that it does not have, with their values; those that are no options are left to others.

    Raises:
        UnknownArgument: with the call that would do.
    """
    options = {each: value for each, value in unknown.items() if each in FIELDS}
    if not options:
        return
    _refuse_fields(caller, options)
    typed = ", ".join(f"{each}={_typed(value)}" for each, value in options.items())
    first = next(iter(options))
    raise UnknownArgument(
        f"{caller} takes {_listed(options)} in its options: options=ebbtide.Options({typed})",
        argument=first,
        value=options[first],
        accepted=("options",),
    )


def options_of(caller: str, options: Options | None = None, **named: Any) -> Options:
    """The options of one call: ``options=``, and what it was given by name besides.

    Args:
        caller: the function's name.
        options: as they were given; ``None`` are those by default.
        named: fields that the function takes by name too.

    Raises:
        UsageError: for what are no options, a field given in both ways, or one that the function does not take.
    """
    if options is None:
        options = Options()
    if not isinstance(options, Options):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"options takes an ebbtide.Options, not {shown(options)}: options=ebbtide.Options(effort=1000)",
            argument="options",
            value=options,
        )
    here, there = Options(**named).set_fields(), options.set_fields()
    for each in named:
        if each in here and each in there:
            raise UsageError(
                f"{each} is given twice, by {each}= and in options=; leave one of them out",
                argument=each,
                value=here[each],
            )
    _refuse_fields(caller, {**there, **here})
    return replace(options, **here) if here else options


def _refuse_fields(caller: str, fields: Mapping[str, object]) -> None:
    """Refuse options that ``caller`` does not take (definition 3)."""
    for each, why in NOT_TAKEN[caller].items():
        if each in fields:
            raise UsageError(f"{caller} takes no {each}: {why}", argument=each, value=fields[each])


def _typed(value: object) -> str:
    """A value as one would type it; of an object dots."""
    return shown(value) if value is None or isinstance(value, str | int | float) else "..."


def _listed(names: Iterable[str]) -> str:
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last

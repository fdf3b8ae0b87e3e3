"""What commands take of :class:`~ebbtide.options.Options`, written once: a command is given the record.

An option's name, default and text are those of its field, the text its first sentence. Nothing here imports torch:
whoever asks for help or mistypes an option does not wait for it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Annotated, Any

import typer

from ebbtide.case import Case
from ebbtide.cli.optimizers import OPTIMIZER_NAMES, optimizer_named
from ebbtide.errors import UsageError
from ebbtide.options import GRADIENTS, REWRITES, STEPS, Options, texts
from ebbtide.planners import planner_names
from ebbtide.tiers import TIERS

__all__ = ["OPTIONS", "SEARCH", "beginning", "help_of", "several_tiers", "with_options"]


def _machine_names() -> Iterable[str]:
    from ebbtide.step.machine import catalogue

    return catalogue()


OPTIONS: dict[str, tuple[Any, Callable[[], Iterable[str]] | None]] = {
    "planner": (str, planner_names),
    "machine": (str | None, _machine_names),
    "tiers": (str | None, lambda: TIERS),
    "optimizer": (str | None, lambda: OPTIMIZER_NAMES),
    "offload_optimizer": (bool, None),
    "step": (str | None, lambda: STEPS),
    "max_norm": (float | None, None),
    "gradients": (str | None, lambda: GRADIENTS),
    "rewrites": (str | None, lambda: REWRITES),
    "effort": (int, None),
    "time_limit": (float | None, None),
    "seed": (int, None),
}
"""The fields that commands take, as what they are typed, and the words that such a value may begin."""
SEARCH = frozenset({"planner", "effort", "time_limit", "seed"})
"""Of these, how plans are looked for: they say nothing about the step."""
_ONLY_HERE = {
    "tiers": ", as host,disk",
    "machine": "; default: measured here",
    "optimizer": f": {', '.join(OPTIMIZER_NAMES)}",
}
"""What a text says on the command line besides."""
_OF_CASES = frozenset(each.name for each in fields(Case))


def with_options(
    *, without: Iterable[str] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command with the options of :data:`OPTIONS` in the place of its ``options``, an :class:`Options`.

    Args:
        without: options that it does not take.
        defaults: of options, where they are others than those of the record.
    """
    taken = [each for each in OPTIONS if each not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(command, eval_str=True).parameters.values():
            own = [each] if each.name != "options" else [_parameter(name, defaults) for name in taken]
            parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]

        @functools.wraps(command)
        def with_record(**given: Any) -> None:
            command(options=_record({name: given.pop(name) for name in taken}), **given)

        with_record.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_record.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_record

    return decorate


def _parameter(name: str, defaults: dict[str, Any]) -> inspect.Parameter:
    kind, words = OPTIONS[name]
    default = defaults.get(name, False if kind is bool else getattr(Options(), name))
    flags = (f"--{name.replace('_', '-')}",) if kind is bool else ()  # no --no- besides
    option = typer.Option(*flags, help=help_of(name), autocompletion=None if words is None else beginning(words))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def help_of(name: str) -> str:
    """The first sentence below a field as the command line writes it."""
    sentence = texts()[name].partition("\n\n")[0].removesuffix(".")
    said = re.sub(r'``"?(.*?)"?``', r"\1", " ".join(sentence.split()))
    own = "; default: the case's own" if name in _OF_CASES else ""
    return f"{said[0].lower()}{said[1:]}{_ONLY_HERE.get(name, '')}{own}"


def beginning(words: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Completes what was typed to those of ``words`` that begin with it."""

    def complete(incomplete: str) -> list[str]:
        return [each for each in words() if each.startswith(incomplete)]

    return complete


def _record(typed: dict[str, Any]) -> Options:
    """The record of what was typed.

    Raises:
        UsageError: for a value that is none.
    """
    if typed["offload_optimizer"] and typed["tiers"] in (None, "none"):
        raise UsageError(
            "--offload-optimizer needs a tier to move the state to: --tiers disk on a CPU, --tiers host on a card",
            argument="--offload-optimizer",
            value=True,
        )
    typed |= {"tiers": several_tiers(typed["tiers"]), "optimizer": optimizer_named(typed["optimizer"])}
    return Options(**typed)


def several_tiers(names: str | None) -> list[str] | None:
    """What ``--tiers`` names: one tier, or several with commas between them; ``none`` for none."""
    return None if names in (None, "none") else [name.strip() for name in names.split(",")]

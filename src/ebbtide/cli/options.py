"""What commands take of :class:`~ebbtide.options.Options`, and of sizes, written once: a command is given the record.

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
from ebbtide.names import DTYPES
from ebbtide.options import GRADIENTS, REWRITES, STEPS, Options, texts
from ebbtide.planners import planner_names
from ebbtide.tiers import TIERS

__all__ = ["OPTIONS", "SEARCH", "SIZES", "Sizes", "beginning", "help_of", "several_tiers", "with_options"]


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
Sizes = dict[str, int | str]
"""Those of :data:`SIZES` that were given."""
SIZES: dict[str, tuple[Any, str, Callable[[], Iterable[str]] | None]] = {
    "batch": (int | None, "of zoo:NAME or hf:PATH: sequences or images of the call", None),
    "layers": (int | None, "of zoo:NAME or hf:PATH that has them to choose", None),
    "length": (int | None, "of the sequences of zoo:NAME or hf:PATH that has it to choose", None),
    "image": (int | None, "height and width in pixels, of zoo:NAME or hf:PATH of images", None),
    "dtype": (str | None, f"of hf:PATH or zoo:NAME that has it to choose: {', '.join(DTYPES)}", lambda: DTYPES),
    "lora": (int | None, "rank of PEFT's adapters, trained in place of hf:PATH or zoo:NAME that takes them", None),
}
"""What models that are made here have to choose, each where it has it: the type, the text, the words that it may be."""
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

    In the place of its ``sizes``, if it has them, are those of :data:`SIZES`: it is given what was typed of them.

    Args:
        without: options that it does not take.
        defaults: of options, where they are others than those of the record.
    """
    taken = [each for each in OPTIONS if each not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(command, eval_str=True).parameters.values():
            match each.name:
                case "options":
                    parameters += [_parameter(name, defaults) for name in taken]
                case "sizes":
                    parameters += [_option(name, None, *SIZES[name], least=1) for name in SIZES]
                case _:
                    parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        has_sizes = any(each.name in SIZES for each in parameters)

        @functools.wraps(command)
        def with_record(**given: Any) -> None:
            if has_sizes:
                typed = {name: given.pop(name) for name in SIZES}
                given["sizes"] = {name: value for name, value in typed.items() if value is not None}
            command(options=_record({name: given.pop(name) for name in taken}), **given)

        with_record.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_record.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_record

    return decorate


def _parameter(name: str, defaults: dict[str, Any]) -> inspect.Parameter:
    kind, words = OPTIONS[name]
    return _option(
        name, defaults.get(name, False if kind is bool else getattr(Options(), name)), kind, help_of(name), words
    )


def _option(
    name: str, default: Any, kind: Any, text: str, words: Callable[[], Iterable[str]] | None, least: int | None = None
) -> inspect.Parameter:
    flags = (f"--{name.replace('_', '-')}",) if kind is bool else ()  # no --no- besides
    option = typer.Option(
        *flags,
        help=text,
        min=least if kind == (int | None) else None,
        autocompletion=None if words is None else beginning(words),
    )
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

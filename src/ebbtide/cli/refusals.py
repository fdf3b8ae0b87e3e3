"""How a refusal is told on a terminal: in a command's words, and with the command that would work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from ebbtide.cli.options import OPTIONS
from ebbtide.errors import BudgetError, EbbtideError, UsageError

__all__ = ["as_options", "in_words"]

_FITTED = re.compile(r" \(of a fitted model: ebbtide\.set_budget\)")
_BUDGET = re.compile(r"--budgets?")


_CALL = re.compile(r"\b(?:ebbtide\.)?fit\(model, budget, ([^()]*)\)")
_RECORD = re.compile(r"options=ebbtide\.Options\(([^()]*)\)")
_ARGUMENT = re.compile(
    rf"\b({'|'.join([*OPTIONS, 'budget', 'overhead'])})=(?:\"([^\"]*)\"|'([^']*)'|(True)|([\w.%-]*\w))?"
)
_SHARES = re.compile(r"'[\d.]+%' for a share of the unplanned peak, |, or \"60%\" of the unplanned peak")
_NONE = (("'one-forward' or None", "one-forward, or any"), (", or None for no movement", ", or none for no movement"))


def as_options(text: str) -> str:
    """``text`` with Python's arguments as the options that a command has for them."""
    text = _RECORD.sub(r"\1", text)
    text = _CALL.sub(lambda call: call[1].replace(", ", " ").replace("optimizer=optimizer", "optimizer=adamw"), text)
    for python, command in _NONE:
        text = text.replace(python, command)
    return _ARGUMENT.sub(_as_option, text)


def _as_option(match: re.Match[str]) -> str:
    name = f"--{match[1].replace('_', '-')}"
    value = next((each for each in (match[2], match[3], match[5]) if each), "")
    return f"{name} {value}" if value else name


def in_words(error: EbbtideError, words: Sequence[str]) -> str:
    """What ``error`` says; of a budget that is too small with ``words``, the command's own, put right.

    Args:
        error: that a command ended with.
        words: what the command was called with, its name first.
    """
    said = as_options(str(error)) if isinstance(error, BudgetError | UsageError) and words else str(error)
    if words and words[0] == "max-batch":  # which takes no share
        said = _SHARES.sub("", said)
    works = _that_works(error, words) if isinstance(error, BudgetError) else ""
    return "\n".join([f"ebbtide: {_FITTED.sub('', said)}", *([f"  try: {works}"] if works else [])])


def _that_works(error: BudgetError, words: Sequence[str]) -> str:
    """The command with the least budget for which a plan was found; empty if none was, or it is no larger."""
    if error.smallest_bytes <= error.budget_bytes or not words:
        return ""
    budget = f"{error.smallest_bytes}B"
    changed = list(words)
    for place, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if not _BUDGET.fullmatch(name):
            continue
        if equals:
            changed[place] = f"{name}={budget}"
        elif place + 1 < len(changed):
            changed[place + 1] = budget
        break
    else:
        changed += ["--budgets" if words[0] == "compare" else "--budget", budget]
    return shlex.join(["ebbtide", *changed])

"""How a refusal is told on a terminal: a line per sentence, and the command that would work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from ebbflow.errors import BudgetError, EbbflowError

__all__ = ["told"]

_SENTENCE = re.compile(r"(?<=[\w)%])\. (?=[A-Z0-9])")
_BUDGET = re.compile(r"--budgets?")


def told(error: EbbflowError, words: Sequence[str]) -> str:
    """What ``error`` says; of a budget that is too small with ``words``, the command's own, put right.

    Args:
        error: that a command ended with.
        words: what the command was called with, its name first.
    """
    if not isinstance(error, BudgetError):
        return f"ebbflow: {error}"
    lines = [f"ebbflow: {_SENTENCE.sub('.' + chr(10) + '  ', str(error))}"]
    works = _that_works(error, words)
    if works:
        lines.append(f"  try: {works}")
    return "\n".join(lines)


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
    return shlex.join(["ebbflow", *changed])

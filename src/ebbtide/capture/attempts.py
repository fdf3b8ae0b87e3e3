"""When a capture is made again: the one place that says which reasons there are, and which is looked at first.

A reason changes something and captures once more, or has nothing to change and lets the failure out to the next one.
From the inside out:
1. A number was a symbol, and the graph fails of that: it becomes a constant (``numbers``).
2. A library does something once, at a model's first call, that no graph can hold: it is done (``first_calls``).
3. The trace ended at an assertion of torch's own: nothing remembered of earlier ones is used (``disturbed``, which also
   waits for other threads that trace).
4. A site that asks whether it is compiled was told that it is not, and that branch is no graph: it is told that it is
   (``branches``). This is last, since another branch may have other bits than eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from ebbtide.capture.branches import on_eagers_branches
from ebbtide.capture.disturbed import undisturbed
from ebbtide.capture.first_calls import after_first_calls
from ebbtide.capture.numbers import Numbers
from ebbtide.torch_seams.eager_answers import Answers

__all__ = ["attempted"]

_Result = TypeVar("_Result")


def attempted(
    attempt: Callable[[], _Result],
    module: torch.nn.Module,
    *,
    answers: Answers | None = None,
    numbers: Numbers | None = None,
) -> _Result:
    """What ``attempt``, a capture of a call of ``module``, returns or raises, after as many attempts as it takes.

    Args:
        attempt: leaves nothing behind where it raises.
        module: whose call it is.
        answers: to sites that ask whether they are compiled; ``None`` where the branch is settled already.
        numbers: of the model's captures, if any of these may be symbols.
    """
    if numbers is not None:
        attempt = partial(numbers.fixed_if_needed, attempt)
    attempt = partial(undisturbed, partial(after_first_calls, attempt, module))
    return attempt() if answers is None else on_eagers_branches(attempt, answers)

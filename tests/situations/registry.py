"""What a situation is, and the list of all of them.

1. A *situation* is a function of a :class:`~situations.run.Run` that builds models and trains them. It is called twice
   in one process, first for eager and then fitted, from the same seeds; it must not know which.
2. Its *share* is the budget as a share of eager's true peak, above 1 where parameters are most of what it takes.
3. Its *outcome* is ``planned``, or a refusal by one of our errors, with a text that the message must match. A
   refusal that nobody expects is a failure, and so is a planned step where a refusal is expected, unless ``either``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["GROUPS", "STATED", "Refusal", "Situation", "all_situations", "situation", "variants"]

GROUPS = {
    "copies": "Gradients that autograd copies",
    "outputs": "Outputs of the last call stay alive",
    "optimizers": "States of optimizers",
    "resident": "What is resident: tensors that no module lists, first calls",
    "several": "Several forwards before a backward",
    "retained": "Retained graphs, losses outside, 100 %",
    "hooks": "Hooks that come late, and other changes",
    "autocast": "Autocast and other types",
    "kernels": "Kernels that could be decomposed",
    "rewritten": "Orders of summation, memory that is rewritten",
    "forwards": "Ways into a model",
    "compiled": "torch.compile and threads",
    "trainers": "Trainers",
    "lightning": "Lightning's Trainer",
    "roles": "Roles of outputs, frozen models, keys",
    "draws": "Random draws, dropped layers, hooks that ask for gradients",
    "algebra": "Kernels that cannot be timed alone, sparse gradients",
    "checkpoints": "Checkpoints, adapters, preferences",
    "adapted": "PEFT",
    "accelerated": "accelerate",
    "preferred": "TRL",
    "distributed": "DistributedDataParallel over gloo",
    "refused": "What no plan can hold",
    "smallest": "The smallest budget that a refusal names is asked for",
    "recaptured": "Captured once",
    "exceptions": "Exceptions, interruptions, observers",
    "leftovers": "Nothing stays behind",
    "hugging": "Hugging Face's models from configurations, tiny",
    "reports": "Loops of public reports, each kind with siblings, and what refusals advise",
    "large": "Second oracles: VmHWM and RLIMIT_DATA on models of 64 MiB and more",
}


@dataclass(frozen=True)
class Refusal:
    """An error of ours that is right.

    Attributes:
        error: name of its class.
        text: a regular expression that its message has to contain.
    """

    error: str
    text: str


@dataclass(frozen=True)
class Situation:
    """Definitions 1 to 3.

    Attributes:
        name: of the situation, unique.
        group: key of :data:`GROUPS`.
        run: builds and trains.
        share: of eager's true peak.
        captures: how many are expected; ``None`` for as many as models are fitted, -1 if it is not held.
        calls: planned calls that are expected; ``None`` for as many as eager made with gradients on, -1 if not held.
        refused: the refusal that is right.
        either: whether a planned step is right beside ``refused``.
        limit: a limit that docs/limits.md states, for which other bits are right.
        over: steps that may exceed the budget by a limit that docs/limits.md states.
        said: a warning that has to come where a step is over its budget or, by a limit, has other bits.
        processes: that run it at once, each judged by what it sees; the others are of ``RANK`` 1 and above.
        seconds: the most that it may take.
    """

    name: str
    group: str
    run: Callable[..., None]
    share: float = 0.75
    captures: int | None = None
    calls: int | None = None
    refused: Refusal | None = None
    either: bool = False
    limit: str = ""
    over: tuple[int, ...] = ()
    said: str = ""
    processes: int = 1
    seconds: float = 240.0


STATED = "(a stated limit) "
"""Begins the reason of a situation that is right because docs/limits.md says so."""
_FOUND: dict[str, Situation] = {}


def situation(**settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function under its own name."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        _add(function.__name__, function, settings)
        return function

    return register


def variants(of: Mapping[str, Any], **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function once per entry of ``of``, which is its second argument, under ``function_entry``."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for name, value in of.items():
            _add(f"{function.__name__}_{name}", functools.partial(_with, function, value), settings)
        return function

    return register


def _with(function: Callable[..., None], value: Any, run: Any) -> None:
    function(run, value)


def _add(name: str, function: Callable[..., None], settings: Mapping[str, Any]) -> None:
    module = getattr(function, "__module__", "") or function.args[0].__module__  # type: ignore[attr-defined]
    if isinstance(function, functools.partial):
        module = function.args[0].__module__
    assert name not in _FOUND, f"two situations are called {name}"
    _FOUND[name] = Situation(name, module.rpartition(".")[2].rstrip("_0123456789"), function, **settings)


def all_situations(groups: Iterable[str] = GROUPS) -> dict[str, Situation]:
    """Those of ``groups`` by name, in order."""
    for group in groups:
        importlib.import_module(f"situations.{group}")
    return dict(_FOUND)

"""Whether gradients of earlier steps are cleared between a forward and its backward (``known_windows``, definition 6).

Where none are there when a forward begins, calls of ``zero_grad`` are watched until the backward. Where some are, their
storages are looked at when it begins; once they were seen to go, only whether parameters have gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from ebbtide.engine.known_windows import Cleared
from ebbtide.measurement.resident import gradient_watches
from ebbtide.torch_seams.optimizers import gradient_of
from ebbtide.torch_seams.storages import StorageWatch, parameters_in
from ebbtide.torch_seams.zero_grad import watch_zero_grad

__all__ = ["Clearing", "clearing_of"]


class Clearing:
    """Finds out for one step.

    Args:
        module: whose step it is.
        found: what is known when its backward begins, of the module.
    """

    def __init__(self, module: torch.nn.Module, found: Callable[[torch.nn.Module], Cleared]) -> None:
        self._module, self._found = weakref.ref(module), found

    def found(self) -> Cleared | None:
        """What the step has told, whose backward begins; ``None`` if its module is gone."""
        module = self._module()
        return None if module is None else self._found(module)


def clearing_of(module: torch.nn.Module, known: Cleared, gradient_bytes: int) -> Clearing | None:
    """What finds out for a step of ``module`` that is about to run; ``None`` where nothing is left to find out.

    Args:
        module: whose step it is.
        known: by earlier steps.
        gradient_bytes: of its gradients, which may go before its backward.
    """
    if known is Cleared.KEPT:
        return None
    if known is Cleared.SEEN:
        return Clearing(module, _by_parameters) if gradient_bytes else None
    if gradient_bytes:
        return Clearing(module, _Watched(gradient_watches(module)))
    if known is Cleared.NEVER_SEEN and not _has_gradients(module):
        return Clearing(module, _Called())
    return None


def _by_parameters(module: torch.nn.Module) -> Cleared:
    return Cleared.KEPT if _has_gradients(module) else Cleared.SEEN


def _has_gradients(module: torch.nn.Module) -> bool:
    return any(each.is_leaf and gradient_of(each) is not None for each in parameters_in(module))


class _Watched:
    """Watches gradients that are there."""

    def __init__(self, watches: Sequence[StorageWatch]) -> None:
        self._watches = watches

    def __call__(self, _: torch.nn.Module) -> Cleared:
        return Cleared.KEPT if any(each.alive for each in self._watches) else Cleared.SEEN


class _Called:
    """Notes which parameters ``zero_grad`` is called for."""

    def __init__(self) -> None:
        cleared = self._cleared = set[int]()

        def note(parameters: Iterable[torch.Tensor]) -> None:
            cleared.update(map(id, parameters))

        self._watch = watch_zero_grad(note)

    def __call__(self, module: torch.nn.Module) -> Cleared:
        self._watch.close()
        trained = {id(each) for each in parameters_in(module) if each.requires_grad}
        return Cleared.ASKED if trained <= self._cleared else Cleared.UNASKED

"""Gradients that a backward has applied, and whoever asks for them.

1. A parameter whose gradient was *applied* in the backward has none to show. From then until it is cleared, as a loop
   clears gradients before its next backward, reading or setting ``grad`` in Python is answered here: the parameter has
   a generated class with a descriptor of that name (``torch_seams.optimizers``). It is a parameter of its class in all
   else; copies and pickles are plain ones.
2. Before ``optimizer.step()`` nothing but that step may ask: a clipping, a scaler, a log would see ``None`` and go on,
   and to clear means to leave an update out that has been made.
3. ``optimizer.step()`` finds no gradient and does nothing more. From then on clearing ends it (``zero_grad``,
   ``p.grad = None``); any other reader is told that the gradient is gone.
4. A backward that begins while something is not cleared would add to it in eager, so it is refused.
5. While a training call looks at the model, parameters have their own classes: captures depend on them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

from ebbtide.errors import UsageError
from ebbtide.torch_seams.optimizers import clears_gradients, gradient_of, is_of_step, reader, set_gradient

__all__ = ["GradientGuard", "GuardState"]


_TO_CLIP = (
    "What clips gradients (torch.nn.utils.clip_grad_norm_) is left to the step: "
    'ebbtide.fit(model, budget, optimizer=optimizer, step="inside", options=ebbtide.Options(max_norm=...)), and the '
    "line in the loop taken out"
)
_CLIPPED = (
    "They have been clipped in the step (max_norm): take torch.nn.utils.clip_grad_norm_ out of the loop; their norm is "
    "ebbtide.total_norm(model)"
)


class GuardState(enum.Enum):
    """How far the step is that has updated parameters in its backward."""

    CLEARED = "cleared: a backward may begin"
    UPDATED = "updated, and the optimizer has not stepped"
    STEPPED = "stepped, and not cleared"


class GradientGuard:
    """Applied gradients of one model.

    Args:
        functions: of the optimizer's class.
        clips: whether the step clips gradients itself.

    Attributes:
        state: of all of them.
        in_step: whether ``optimizer.step()`` runs.
        overflowed: whether some were not finite, so that nothing has been updated.
        rounds: how often a backward has updated something.
        stepped_round: the last of these whose ``optimizer.step()`` has ended.
    """

    def __init__(self, functions: frozenset[CodeType], *, clips: bool = False) -> None:
        self._clips = clips
        self.overflowed = False
        self.rounds = self.stepped_round = 0
        self.state = GuardState.CLEARED
        self.in_step = False
        self._functions = functions
        self._names: dict[int, tuple[torch.Tensor, str]] = {}
        self._unscaling = False

    def __bool__(self) -> bool:
        return bool(self._names)

    @property
    def names(self) -> list[str]:
        """Names of the parameters that have been updated and are not cleared."""
        return [name for _, name in self._names.values()]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """These parameters."""
        return [parameter for parameter, _ in self._names.values()]

    def add(self, parameters: Sequence[tuple[torch.Tensor, str]]) -> None:
        """These have been updated: definition 1."""
        self.state = GuardState.UPDATED
        self.rounds += 1
        self._names.update({id(each): (each, name) for each, name in parameters})
        self._show()

    def clear(self) -> None:
        """Forget all: the model is not fitted any more, or has another optimizer."""
        self._hide()
        self._names.clear()
        self.state = GuardState.CLEARED

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While open, parameters have their own classes (definition 5)."""
        self._hide()
        try:
            yield
        finally:
            self._show()

    def _show(self) -> None:
        for parameter, _ in self._names.values():
            _guards[id(parameter)] = self
            if "_ebbtide_applied" not in vars(type(parameter)):
                parameter.__class__ = _class_of(type(parameter))  # type: ignore[assignment]

    def _hide(self) -> None:
        for parameter, _ in self._names.values():
            self._plain(parameter)

    def _plain(self, parameter: torch.Tensor) -> None:
        _guards.pop(id(parameter), None)
        if "_ebbtide_applied" in vars(type(parameter)):
            parameter.__class__ = type(parameter).__bases__[0]  # type: ignore[assignment]

    @contextmanager
    def unscaled(self) -> Iterator[tuple[set[torch.device], bool]]:
        """While open, a scaler looks at gradients, and sees none of those that were applied.

        Gives the devices of these, and whether any was not finite; the scaler leaves ``optimizer.step()`` out then.
        """
        if self.state is not GuardState.UPDATED:
            yield set(), False
            return
        self._unscaling = True
        try:
            yield {each.device for each in self.parameters}, self.overflowed
        finally:
            self._unscaling = False
        if self.overflowed:
            self.state = GuardState.STEPPED

    # -- who asks -------------------------------------------------------------------------------------------

    def read(self, parameter: torch.Tensor, frame: FrameType) -> torch.Tensor | None:
        """Somebody reads the gradient of ``parameter``."""
        clears = clears_gradients(frame)
        if self._unscaling:
            return None
        if self.in_step and not clears and is_of_step(frame, self._functions):
            return gradient_of(parameter)
        if self.state is GuardState.STEPPED and clears:
            if frame.f_locals.get("set_to_none") is False:
                raise UsageError(
                    "zero_grad(set_to_none=False) would keep zeros in the memory of gradients that the step has "
                    'applied and freed (step="inside"); leave the argument out'
                )
            self._done(parameter)
            return None
        raise self._refusal(parameter, clears=clears)

    def write(self, parameter: torch.Tensor, gradient: torch.Tensor | None, frame: FrameType) -> None:
        """Somebody sets it."""
        if self.state is not GuardState.STEPPED:
            raise self._refusal(parameter, clears=gradient is None)
        self._done(parameter)
        set_gradient(parameter, gradient)

    def _done(self, parameter: torch.Tensor) -> None:
        self._plain(parameter)
        self._names.pop(id(parameter), None)
        if not self._names:
            self.state = GuardState.CLEARED

    def _refusal(self, parameter: torch.Tensor, *, clears: bool) -> UsageError:
        _, name = self._names[id(parameter)]
        if self.state is GuardState.STEPPED and not self.in_step:  # in the step only its own hooks get here
            return UsageError(
                f'the gradient of {name} was applied in the backward (step="inside") and is gone: there is none to '
                "read until it is cleared (optimizer.zero_grad()) and another backward has run. What is logged of "
                'gradients needs the optimizer outside of the step: leave step="inside" out'
            )
        if clears:
            return UsageError(
                f'the gradient of {name} is to be cleared before optimizer.step(), and step="inside" has applied it in '
                "the backward: this update cannot be left out any more. Call optimizer.step() after every backward; to "
                "look at a loss first (torch.isfinite(loss)), do so before loss.backward(); to accumulate, run all but "
                "the last backward in ebbtide.no_update(model)"
            )
        return UsageError(
            f'the gradient of {name} is read before optimizer.step(), and step="inside" has applied it in the '
            f"backward: there is none. {_CLIPPED if self._clips else _TO_CLIP}. What scales them (GradScaler) is given "
            "to fit as scaler=, and stays in the loop. What logs gradients needs the optimizer outside of the step: "
            'leave step="inside" out'
        )


_guards: dict[int, GradientGuard] = {}
"""By id of a parameter that has a generated class, who answers; it keeps the parameter alive."""


class _Gradient:
    """The descriptor of definition 1."""

    def __get__(self, parameter: torch.Tensor | None, kind: type) -> Any:
        if parameter is None:
            return self
        guard = _guards.get(id(parameter))
        return gradient_of(parameter) if guard is None else guard.read(parameter, reader())

    def __set__(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        guard = _guards.get(id(parameter))
        if guard is None:
            set_gradient(parameter, gradient)
        else:
            guard.write(parameter, gradient, reader())

    def __delete__(self, parameter: torch.Tensor) -> None:
        self.__set__(parameter, None)


@functools.cache
def _class_of(plain: type[torch.Tensor]) -> type[torch.Tensor]:
    """The subclass of ``plain`` under the same name whose gradients are asked for here."""

    def as_plain(self: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> Any:
        kind = type(self)
        self.__class__ = plain  # type: ignore[assignment]
        try:
            return call(self)
        finally:
            self.__class__ = kind  # type: ignore[assignment]

    names: dict[str, Any] = {
        "grad": _Gradient(),
        "_ebbtide_applied": plain,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "__deepcopy__": lambda self, memo: as_plain(self, lambda each: plain.__deepcopy__(each, memo)),
        "__reduce_ex__": lambda self, protocol: as_plain(self, lambda each: plain.__reduce_ex__(each, protocol)),
    }
    meta: Any = type(plain)
    return meta(plain.__name__, (plain,), names)

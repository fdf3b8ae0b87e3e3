"""Gradients that a backward has applied, and whoever asks for them.

1. A parameter whose gradient was *applied* in the backward has none to show. From then until it is cleared, as a loop
   clears gradients before its next backward, reading or setting ``grad`` in Python is answered here: the parameter has
   a generated class with a descriptor of that name (``torch_seams.optimizers``). It is a parameter of its class in all
   else; copies and pickles are plain ones.
2. Before ``optimizer.step()`` nothing but that step may ask: a clipping, a scaler, a log would see ``None`` and go on,
   and to clear means to leave an update out that has been made.
3. ``optimizer.step()`` finds no gradient and does nothing more. From then on clearing ends it (``zero_grad``,
   ``p.grad = None``); any other reader gets what can be used for nothing (:class:`_Gone`).
4. A backward that begins while something is not cleared would add to it in eager, so it is refused.
5. While a training call looks at the model, parameters have their own classes: captures depend on them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from ebbtide.errors import UsageError, told
from ebbtide.torch_seams.optimizers import gradient_of, set_gradient

__all__ = ["GradientGuard", "GuardState"]


_TO_CLIP = (
    "Leave it to the step to clip gradients (options=ebbtide.Options(max_norm=...) of ebbtide.fit) and take "
    "torch.nn.utils.clip_grad_norm_ out of the loop"
)
_CLIPPED = (
    "Take torch.nn.utils.clip_grad_norm_ out of the loop, for the step has clipped (max_norm); the norm is "
    "ebbtide.total_norm(model)"
)


class GuardState(enum.Enum):
    """How far the step is that has updated parameters in its backward."""

    CLEARED = "cleared: a backward may begin"
    UPDATED = "updated, and the optimizer has not stepped"
    STEPPED = "stepped, and not cleared"


class _Gone:
    """What a reader gets for the gradient of parameter ``name`` after the step: whatever is done with it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<the gradient of {self._name}, which was applied in the backward>"

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f'the gradient of {self._name} was applied in the backward (step="inside") and is gone: there is none to '
            "read, or to set to zero (zero_grad(set_to_none=False)), until it is cleared (optimizer.zero_grad()) and "
            "another backward has run. What is logged of gradients needs the optimizer outside of the step: leave "
            'step="inside" out'
        )

    def __getattr__(self, _: str) -> NoReturn:
        self._refuse()

    @classmethod
    def __torch_function__(cls, function: object, types: object, args: Any = (), kwargs: Any = None) -> NoReturn:
        next((each for each in args if isinstance(each, cls)), cls("a parameter"))._refuse()


class GradientGuard:
    """Applied gradients of one model.

    Args:
        clips: whether the step clips gradients itself.

    Attributes:
        state: of all of them.
        in_step: whether ``optimizer.step()`` runs, and all hooks before it have.
        rounds: how often a backward has updated something.
        stepped_round: the last of these whose ``optimizer.step()`` has ended.
    """

    def __init__(self, *, clips: bool = False) -> None:
        self._clips = clips
        self.rounds = self.stepped_round = 0
        self.state = GuardState.CLEARED
        self.in_step = False
        self._names: dict[int, tuple[torch.Tensor, str]] = {}

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

    # -- who asks -------------------------------------------------------------------------------------------

    def read(self, parameter: torch.Tensor) -> Any:
        """Somebody reads the gradient of ``parameter``."""
        if self.in_step:
            return gradient_of(parameter)
        if self.state is GuardState.STEPPED:
            return _Gone(self._names[id(parameter)][1])
        raise self._refusal(parameter)

    def write(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Somebody sets it."""
        if self.state is not GuardState.STEPPED:
            raise self._refusal(parameter)
        self._done(parameter)
        set_gradient(parameter, gradient)

    def _done(self, parameter: torch.Tensor) -> None:
        self._plain(parameter)
        self._names.pop(id(parameter), None)
        if not self._names:
            self.state = GuardState.CLEARED

    def _refusal(self, parameter: torch.Tensor) -> UsageError:
        _, name = self._names[id(parameter)]
        return UsageError(
            told(
                f'the gradient of {name} is read before optimizer.step(), or cleared, and step="inside" has applied it '
                "in the backward: this update cannot be left out any more",
                f"{_CLIPPED if self._clips else _TO_CLIP}. Look at a loss (torch.isfinite(loss)) before its backward; "
                'accumulate in ebbtide.no_update(model). To log gradients, leave step="inside" out',
            )
        )


_guards: dict[int, GradientGuard] = {}
"""By id of a parameter that has a generated class, who answers; it keeps the parameter alive."""


class _Gradient:
    """The descriptor of definition 1."""

    def __get__(self, parameter: torch.Tensor | None, kind: type) -> Any:
        if parameter is None:
            return self
        guard = _guards.get(id(parameter))
        return gradient_of(parameter) if guard is None else guard.read(parameter)

    def __set__(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        guard = _guards.get(id(parameter))
        if guard is None:
            set_gradient(parameter, gradient)
        else:
            guard.write(parameter, gradient)

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

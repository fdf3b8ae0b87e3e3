"""The class of a fitted model: whoever calls it and however, its training calls come to the planned step.

1. It is a generated subclass of the model's own that overrides ``forward`` alone, as PyTorch's ``fully_shard`` does, so
   ``isinstance``, attributes, ``state_dict`` keys, hooks, optimizers and saving keep working. Copies and pickles of a
   fitted model are plain models.
2. ``forward`` is a data descriptor: a ``forward`` that is put on the model itself (accelerate's ``prepare`` and
   ``add_hook_to_module``, a patch by hand) does not hide it but is what is planned from then on. What such a
   ``forward`` was wrapped around is an *entry* one level below, and runs as it is written inside of the one above.
3. A training call is one with gradients on. It runs as it is written while our own capture traces it, as a part of
   what is captured, and where somebody exports or traces the model, which trains nothing. A ``torch.compile`` of
   somebody else's leaves it out of its graphs (``torch.compiler.disable``).
4. A model that is given another class, or whose class is given another ``forward``, is not planned any more: its
   optimizer's next step is refused, as all training past the plan is (``calls``).
"""

from __future__ import annotations

import abc
import functools
import threading
import types
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ebbtide.capture.trace import without_model
from ebbtide.engine.calls import Watched
from ebbtide.engine.copies import copying
from ebbtide.engine.loop import train
from ebbtide.engine.model import FittedModel
from ebbtide.engine.pending_steps import returned_tensors
from ebbtide.errors import EbbtideError, UsageError, without_frames
from ebbtide.measurement.leftovers import leave, watches_of
from ebbtide.signals import raised_by_a_handler
from ebbtide.torch_seams.compile_mode import (
    capturing,
    constant_in_traces,
    exporting_here,
    left_out_of_traces,
    tracing_here,
)

__all__ = ["FITTED", "fitted_class", "watched_of_fitted"]

FITTED: MutableMapping[torch.nn.Module, FittedModel] = WeakIdKeyDictionary()
"""All fitted models, told apart by identity: a module may have an ``==`` of its own."""

_NO_GRADIENTS = "no gradients (torch.no_grad or inference_mode)"

_Forward = Callable[..., Any]


def watched_of_fitted() -> Iterator[Watched]:
    """Every fitted model, as optimizers look at it."""
    return (
        Watched(
            model,
            fitted.calls,
            fitted.optimizers.note_optimizer,
            fitted.pending.backwards,
            fitted.gradient_watcher,
            fitted.configuration.advice,
            fitted.optimizers.updated_and_not_stepped,
            fitted.judge.tell,
        )
        for model, fitted in list(FITTED.items())
    )


def fitted_class(plain: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The subclass of ``plain`` under the same name whose training calls are planned (definition 1)."""
    known = _SUBCLASSES.get(plain)
    if known is None or not isinstance(vars(known)["forward"], _ForwardOfModel):  # somebody has put another on it
        known = _SUBCLASSES[plain] = _subclass(plain)
    return known


_SUBCLASSES: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}


def _subclass(plain: type[torch.nn.Module]) -> type[torch.nn.Module]:
    names: dict[str, Any] = {
        "forward": _ForwardOfModel(plain),
        "_ebbtide_plain": plain,
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        **copying(plain, FITTED.__contains__),
    }
    if issubclass(plain, torch.fx.GraphModule):
        names["recompile"] = _refuse_to_recompile
    names["__qualname__"] = plain.__qualname__
    meta: Any = type(plain)
    # A metaclass of the user's may register classes too, or ask for keywords: it makes those that users write.
    maker: Any = abc.ABCMeta if issubclass(meta, abc.ABCMeta) else type
    try:
        announced = any("__init_subclass__" in vars(each) for each in plain.__mro__[:-1])
        return maker.__new__(meta, plain.__name__, (_Unannounced, plain) if announced else (plain,), names)
    except Exception as error:
        if raised_by_a_handler(error):
            raise
        raise UsageError(
            f"{plain.__name__} lets no class be derived from it ({type(error).__name__}: {error}), and a fitted "
            "model's is; put the model into a module of your own (a class whose forward calls it) and fit that",
            argument="model",
        ) from error


def _refuse_to_recompile(model: torch.fx.GraphModule) -> None:
    raise UsageError(
        "a fitted GraphModule cannot be recompiled: its class has the planned forward; ebbtide.unfit(model) first, and "
        "fit it again",
        argument="model",
    )


class _Unannounced:
    """A base that keeps ``__init_subclass__`` of a model's class, which may register classes, from generated ones."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        if "_ebbtide_plain" not in vars(cls):
            super().__init_subclass__(**keywords)


class _ForwardOfModel:
    """The ``forward`` of a fitted model (definition 2).

    Args:
        plain: the model's class, whose ``forward`` may be replaced later.
    """

    def __init__(self, plain: type[torch.nn.Module]) -> None:
        self._plain = plain
        self._forward: _Forward = plain.forward
        self._of_class = _entry(self._forward)

    def __get__(self, model: torch.nn.Module | None, kind: type[torch.nn.Module]) -> _Forward:
        if not _traced() and self._plain.forward is not self._forward:
            self._forward = self._plain.forward
            self._of_class = _entry(self._forward)
        if model is None:
            return self._of_class
        own = model.__dict__.get("forward")
        if own is None:
            if not _traced():
                return types.MethodType(self._of_class, model)
            # Dynamo, which traces this too, cannot make a method.
            bound = _BoundToGraph if isinstance(model, torch.fx.GraphModule) else functools.partial
            return bound(self._of_class, model)
        if isinstance(own, types.MethodType) and own.__self__ is model:
            return types.MethodType(_entry(own.__func__), model)
        return functools.wraps(own)(functools.partial(_entry(without_model(own)), model))

    def __set__(self, model: torch.nn.Module, value: _Forward) -> None:
        model.__dict__["forward"] = value

    def __delete__(self, model: torch.nn.Module) -> None:
        if model.__dict__.pop("forward", None) is None:
            raise AttributeError("forward")


class _BoundToGraph(functools.partial[Any]):
    """A function with its first argument, of which Dynamo wants the code as it would have a method's."""

    @property
    def __code__(self) -> types.CodeType:
        return self.func.__code__  # type: ignore[no-any-return]


def _entry(forward: _Forward) -> _Forward:
    """``forward``, which takes the model first, with its training calls planned (definition 3)."""
    planned = _planned()

    @functools.wraps(forward)
    def entry(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _as_written():
            return forward(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            called = forward if _traced() else functools.partial(_without_gradients, forward)
            return called(self, *args, **kwargs)
        # Where somebody else's compilation is running, what it traces ends here.
        if _traced():
            return planned(self, forward, args, kwargs)
        fitted = FITTED.get(self)
        if fitted is None:
            return forward(self, *args, **kwargs)
        try:
            return train(fitted, self, forward, args, kwargs)
        except EbbtideError as error:
            raise without_frames(error) from error.__cause__

    return entry


@constant_in_traces
def _traced() -> bool:
    return tracing_here()


@constant_in_traces
def _as_written() -> bool:
    return capturing() or exporting_here()


class _Inside(threading.local):
    """Models whose calls without gradients this thread is in."""

    def __init__(self) -> None:
        self.models: set[int] = set()


_inside = _Inside()


def _without_gradients(forward: _Forward, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``forward``, counted once however many entries it goes through (definition 2)."""
    if id(model) in _inside.models:
        return forward(model, *args, **kwargs)
    _inside.models.add(id(model))
    try:
        outputs = forward(model, *args, **kwargs)
    finally:
        _inside.models.discard(id(model))
    if (fitted := FITTED.get(model)) is not None:
        fitted.calls.count_unplanned(_NO_GRADIENTS)
    leave(watches_of(returned_tensors(outputs)))
    return outputs


@functools.cache  # made when the first model is fitted: it imports the compiler
def _planned() -> Callable[..., Any]:
    reason = (
        "Ebbtide plans this model's training calls; compile with fullgraph=False, or do not compile it: Ebbtide "
        "captures it itself"
    )
    return left_out_of_traces(_train, reason)


def _train(model: torch.nn.Module, forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fitted = FITTED.get(model)
    return forward(model, *args, **kwargs) if fitted is None else train(fitted, model, forward, args, kwargs)

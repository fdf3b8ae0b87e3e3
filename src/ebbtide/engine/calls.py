"""How a fitted model's calls went: how many were planned, and how many were not and why.

Training that goes past the model (its parts are called, its weights used elsewhere) shows where nothing else would
see it: an optimizer is about to step on gradients that no planned step has made. So one hook before every step of
every optimizer (``register_optimizer_step_pre_hook``) looks at those of fitted models. Gradients that no backward of
this process has made, written by hand or come from another process, took no step's memory and are left alone.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ebbtide.engine.gradient_watcher import Backwards, GradientWatcher, backwards_so_far
from ebbtide.errors import EbbtideError, UsageError, told
from ebbtide.torch_seams.compile_mode import left_out_of_traces
from ebbtide.torch_seams.compiling_flag import optimizer_has_stepped, optimizer_steps
from ebbtide.torch_seams.optimizers import gradient_of
from ebbtide.torch_seams.storages import StorageWatch, parameters_in, version_of

__all__ = ["NOTHING_TO_TRAIN", "Calls", "Watched", "watch_optimizers"]

NOTHING_TO_TRAIN = "nothing to train: no parameter or argument takes a gradient"
_PAST_THE_MODEL = "optimizer steps on gradients of no planned call"

_ADVICE = (
    "call the model that was fitted with gradients on, model(...), or self(...) in a method of its own such as a "
    "training_step; or fit the part that is called: ebbtide.unfit(model), then ebbtide.fit(model.part, budget)"
)

_ADD_UP = (
    "add it to a planned call's loss, so that both go through one backward: (model(...) + penalty).backward(); or call "
    "the fitted model itself; or fit the part that is called (ebbtide.unfit(model), ebbtide.fit(model.part, budget))"
)
_UNCHANGED = "no weight has been changed"


@dataclass(kw_only=True)
class Calls:
    """Counts of one fitted model, since ``fit``.

    Attributes:
        planned: training calls that ran under a plan.
        unplanned: of other calls, by reason.
        fitted_with_gradients: whether there were gradients already, so that the first step of an optimizer uses those.
        backwards_before: of the process, when the model was fitted.
    """

    planned: int = 0
    unplanned: dict[str, int] = field(default_factory=dict[str, int])
    fitted_with_gradients: bool = field(default=False, repr=False)
    backwards_before: Backwards = field(default=Backwards(0, None), repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def count_planned(self) -> None:
        """A training call has run under a plan."""
        with self._lock:
            self.planned += 1

    def count_unplanned(self, reason: str) -> None:
        """A call has run as it is written."""
        with self._lock:
            self.unplanned[reason] = self.unplanned.get(reason, 0) + 1

    def copy(self) -> Calls:
        """What is counted so far."""
        with self._lock:
            return Calls(planned=self.planned, unplanned=dict(self.unplanned))


class _OfOptimizer:
    """What one optimizer has seen of one fitted model, since it was fitted last.

    Attributes:
        calls: of the model.
        planned: planned backwards of the model at its last step.
        backwards: of the process at its last step.
        last_gradient: the first gradient that its last step used, and how often that had been written to.
    """

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.planned = -1 if calls.fitted_with_gradients else 0
        self.backwards = calls.backwards_before
        self.last_gradient: tuple[StorageWatch, int] | None = None

    def uses_again(self, gradient: torch.Tensor) -> bool:
        """Whether the last step used ``gradient`` as it is now."""
        return self.last_gradient is not None and (self.last_gradient[0].key, self.last_gradient[1]) == (
            StorageWatch(gradient).key,
            version_of(gradient),
        )

    def use(self, gradient: torch.Tensor | None) -> None:
        """The step that comes uses ``gradient``."""
        self.last_gradient = (
            None if gradient is None or gradient.is_sparse else (StorageWatch(gradient), version_of(gradient))
        )


class Watched(NamedTuple):
    """A fitted model as optimizers look at it.

    Attributes:
        model: it.
        calls: of it.
        note_optimizer: what is told of an optimizer that is about to step its weights.
        backwards: planned ones of it that have begun.
        gradient_watcher: of gradients at its parameters.
        advice: what would be planned, where a trainer calls it.
        has_updated: whether its last backward has updated weights, and their optimizer has not stepped since.
        tell: called with what an optimizer's step is refused with, which other ranks are to know.
    """

    model: torch.nn.Module
    calls: Calls
    note_optimizer: Callable[[torch.optim.Optimizer], None]
    backwards: int
    gradient_watcher: GradientWatcher
    advice: str = ""
    has_updated: bool = False
    tell: Callable[[BaseException], None] | None = None


_Fitted = Callable[[], Iterable[Watched]]
_seen: MutableMapping[torch.optim.Optimizer, MutableMapping[torch.nn.Module, _OfOptimizer]] = WeakIdKeyDictionary()
_handles: list[Any] = []


def watch_optimizers(fitted: _Fitted) -> None:
    """Look at every optimizer step from now on, until no fitted model is left.

    Args:
        fitted: the fitted models.
    """
    if not _handles:

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            return _before_step(fitted, optimizer, args, kwargs)

        def after_step(*_: object) -> None:
            optimizer_has_stepped()

        hook = left_out_of_traces(before_step, "Ebbtide looks at what a compiled optimizer is about to train")
        _handles.append(register_optimizer_step_pre_hook(hook))
        ended = left_out_of_traces(after_step, "Ebbtide looks at when a compiled optimizer has stepped")
        _handles.append(register_optimizer_step_post_hook(ended))


def _before_step(
    fitted: _Fitted, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Look at gradients that a step is about to use; those that its closure will make are looked at when it has."""
    if next(iter(fitted()), None) is None:
        while _handles:
            _handles.pop().remove()
        return None
    # The optimizer comes first among the arguments that a hook is given, and a closure next.
    own, rest = args[0], args[1:]
    closure = rest[0] if rest else kwargs.get("closure")
    look = functools.partial(_look, fitted, weakref.ref(optimizer))
    if closure is None:  # what a closure does may take long, and captures would wait for it
        optimizer_steps()
        look()
        return None

    @functools.wraps(closure)
    def looked_at(*inner: Any, **named: Any) -> Any:
        loss = closure(*inner, **named)
        look()
        return loss

    if rest:
        return (own, looked_at, *rest[1:]), dict(kwargs)
    return args, {**kwargs, "closure": looked_at}


def _look(fitted: _Fitted, optimizer: Callable[[], torch.optim.Optimizer | None]) -> None:
    models = list(fitted())
    try:
        _look_at_all(models, optimizer)
    except EbbtideError as error:
        for each in models:
            if each.tell is not None:
                each.tell(error)
        raise


def _look_at_all(models: list[Watched], optimizer: Callable[[], torch.optim.Optimizer | None]) -> None:
    stepping = optimizer()
    assert stepping is not None
    of_optimizer = _seen.setdefault(stepping, WeakIdKeyDictionary())
    backwards = backwards_so_far()
    for each in models:
        of_model = of_optimizer.get(each.model)
        if of_model is None or of_model.calls is not each.calls:
            of_model = of_optimizer[each.model] = _OfOptimizer(each.calls)
        if _trains(stepping, each.model):  # asked each time: parameters come and go
            each.note_optimizer(stepping)
            _look_at(of_model, stepping, each, backwards, functools.partial(_shares, each.model, models))


def _shares(model: torch.nn.Module, models: list[Watched]) -> bool:
    """Whether one of the other ``models`` has parameters of it: as a part of it, around it or beside it."""
    own = set(map(id, model.parameters()))
    others = (each.model for each in models if each.model is not model)
    return any(not own.isdisjoint(map(id, each.parameters())) for each in others)


def _look_at(
    seen: _OfOptimizer,
    optimizer: torch.optim.Optimizer,
    watched: Watched,
    backwards: Backwards,
    shared: Callable[[], bool],
) -> None:
    """Refuse what was trained past ``watched``; ``shared`` tells whether another fitted model has parameters of it.

    Raises:
        UsageError: if gradients come from backwards without a planned step. No weight has been changed.
    """
    arrivals, own = watched.gradient_watcher, list(_own_parameters(optimizer))
    by_others = backwards.others is None or backwards.others != seen.backwards.others
    is_planned = watched.backwards != seen.planned or arrivals.have_come(own)
    first = next(_gradients(optimizer, watched.model), None)
    again = first is not None and not first.is_sparse and seen.uses_again(first)
    besides = arrivals.besides(own)
    of_none = not (besides or is_planned or again) and _has_gradients(optimizer, watched.model)
    if of_none and by_others:
        if not arrivals.watches:  # which would have seen whether another model's planned call made them
            of_none = backwards.planned == seen.backwards.planned or not shared()
        elif backwards.others is None:  # inside of a backward, whose planned step may begin yet
            arrivals.step_in_backward()
            of_none = False
    if by_others:
        arrivals.others_were_there(parameters_in(watched.model))
    if besides or (of_none and by_others):
        watched.calls.count_unplanned(_PAST_THE_MODEL)
        if arrivals.watches:  # and knows whether what a planned call made is there still
            is_planned = arrivals.have_come(each for each in own if gradient_of(each) is not None)
        raise UsageError(_refusal(watched, is_planned=is_planned), argument="model")
    if of_none and backwards == seen.backwards:
        watched.calls.count_unplanned(_PAST_THE_MODEL)
    arrivals.forget(own)
    if not by_others:
        arrivals.all_were_planned()
    seen.planned, seen.backwards = watched.backwards, backwards
    seen.use(first)


def _refusal(watched: Watched, *, is_planned: bool) -> str:
    about = f"an optimizer is about to train {type(watched.model).__name__} with gradients"
    changed = 'the planned one has updated weights (step="inside")' if watched.has_updated else _UNCHANGED
    if is_planned:
        return told(
            f"{about} of two kinds: a planned call made some, and a backward without one has added others, which "
            f"nothing kept within the budget; {changed}",
            watched.advice or _ADD_UP,
        )
    return told(
        f"{about} of which no planned call has made any, so nothing kept them within the budget; {changed}",
        watched.advice or _ADVICE,
    )


def _own_parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _trains(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
    own = {id(each) for each in _own_parameters(optimizer)}
    return any(id(each) in own for each in model.parameters())


def _has_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
    """Whether it would train ``model``: zeros, as ``zero_grad(set_to_none=False)`` leaves them, train nothing."""
    return any(
        bool((each.coalesce().values() if each.is_sparse else each).any()) for each in _gradients(optimizer, model)
    )


def _gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Iterator[torch.Tensor]:
    gradients = (gradient_of(each) for each in _parameters_of_both(optimizer, model))
    return (each for each in gradients if each is not None)


def _parameters_of_both(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Iterator[torch.Tensor]:
    own = {id(each) for each in model.parameters()}
    return (each for each in _own_parameters(optimizer) if id(each) in own)

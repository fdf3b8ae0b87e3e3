"""How many bytes an optimizer's state will take, before its first step has made it; found out without that memory.

1. A stand-in of each distinct parameter is stepped alone, by an optimizer of the same class and options, on fake
   tensors: they have sizes and no memory. A step that asks for a number gets 1 (and 0 where that leads to an error):
   what numbers there are does not change what is kept.
2. A step that fake tensors cannot take (one with kernels or NumPy of its own) is taken by a real stand-in of a few
   elements, whose sizes all differ: a size of its state that is one of these stands for the parameter's.
"""

from __future__ import annotations

import copy
import math
import random
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any

import numpy
import torch

from ebbtide.errors import UsageError
from ebbtide.measurement.resident import held_by, optimizers_in, stepping, storages_in, tensors_in
from ebbtide.optimizer.state.combined import parts_of
from ebbtide.signals import raised_by_a_handler, signals_wait
from ebbtide.torch_seams.fake_tensors import numbers_are, quiet_log, sizes_only, without_modes

__all__ = [
    "attributes_of",
    "future_state_bytes",
    "future_state_sizes",
    "is_option",
    "is_plain",
    "options_of",
    "stand_in_of",
    "tried_out",
]

_ANSWERS = (1, 0)
_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)  # of definition 2


def future_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that ``optimizer`` will hold after its next step and does not hold yet.

    Raises:
        UsageError: if an optimizer of this class cannot be made from its parameter groups, or steps otherwise than
            by ``step()``.
    """
    return sum(future_state_sizes(optimizer))


def future_state_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    """Bytes of each tensor of that state.

    Raises:
        UsageError: as :func:`future_state_bytes`.
    """
    return [size for each in parts_of(optimizer) for size in _future_sizes(stepping(each))]


def _future_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    sizes: dict[tuple[object, ...], list[int]] = {}
    total: list[int] = []
    parts = optimizers_in(optimizer)
    if any(_keeps_for_all(each) for each in parts) or _keeps_for_others(optimizer, parts):
        return total
    for position, group in enumerate(optimizer.param_groups):
        options = options_of(group)
        for parameter in group["params"]:
            if any(each.state.get(parameter) for each in parts) or not parameter.requires_grad:
                continue
            key = (position, tuple(parameter.shape), parameter.dtype, parameter.device)
            if key not in sizes:
                try:
                    sizes[key] = _state_sizes(optimizer, options, parameter)
                except UsageError:
                    if not any(any(each.state.values()) for each in parts):
                        raise
                    return total  # it has stepped, and keeps what it needs with other parameters (LBFGS: one)
            total += sizes[key]
    return total


@contextmanager
def tried_out(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While open, stand-ins of an optimizer step; what its class draws and counts is as before then.

    That is the random states of torch, Python and NumPy, and plain attributes of its classes. Torch's own draw and
    count nothing there.
    """
    classes = type(optimizer).__mro__[:-1]
    own = [each for each in classes if not each.__module__.startswith(("torch.", "typing", "abc"))]
    if not own:
        yield
        return
    python, of_numpy = random.getstate(), numpy.random.get_state()
    kept = [(each, name, value) for each in own for name, value in vars(each).items() if is_plain(value)]
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(cards):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(of_numpy)
            for each, name, value in kept:
                if vars(each).get(name) is not value:
                    setattr(each, name, value)


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """What a trial of an optimizer is made with in place of ``group``, besides parameters; nothing that it changes."""
    given: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, list | dict | set):
            if key != "params" and not any(True for _ in tensors_in(value)):
                with suppress(Exception):  # of what cannot be copied, such as a lock, the constructor has another
                    given[key] = copy.deepcopy(value)
        else:
            given[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return given


def stand_in_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of the class of ``optimizer``, of other groups: what it keeps in attributes it has as well.

    Options are not only in groups: a class of somebody's own may keep the norm that it clips by, or whether it takes a
    momentum, in an attribute, a dictionary in one, or a function. What holds anything else (tensors, modules, a value
    for each parameter) is what its constructor makes.
    """
    made = type(optimizer)(groups)  # type: ignore[call-arg]
    for name, value in vars(optimizer).items():
        if is_plain(value):
            vars(made)[name] = value
        elif name not in _OF_TORCH and not name.startswith("_optimizer_") and is_option(value):
            with suppress(Exception):
                vars(made)[name] = copy.deepcopy(value)  # functions are as they are
    return made


_OF_TORCH = frozenset(("state", "param_groups", "defaults"))


def is_option(value: object, depth: int = 4) -> bool:
    """Whether it is a function that holds nothing, or a dictionary of such and of plain values, by names."""
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(key, str) and is_option(each, depth - 1) for key, each in value.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(value, types.FunctionType):
        return not value.__closure__
    return is_plain(value) or isinstance(value, types.BuiltinFunctionType)


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What of an optimizer's public attributes is plain, but for whole numbers: somebody may count there."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name[:1] != "_" and is_plain(value) and (isinstance(value, bool) or not isinstance(value, int))
    }


def is_plain(value: object) -> bool:
    """Whether it is an immutable value without tensors."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | Enum | torch.dtype)


def _keeps_for_all(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has stepped and keeps state under other names than its parameters."""
    held: list[object] = [state for key, state in optimizer.state.items() if not isinstance(key, torch.Tensor)]
    for group in optimizer.param_groups:
        held += [value for key, value in group.items() if key != "params" and isinstance(value, list | dict)]
    return any(True for _ in tensors_in(held))


def _keeps_for_others(optimizer: torch.optim.Optimizer, parts: Iterable[torch.optim.Optimizer]) -> bool:
    """Whether one that it holds has stepped other parameters in the place of its own, as of copies in float32."""
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return any(
        id(key) not in own and value for each in parts if each is not optimizer for key, value in each.state.items()
    )


def _state_sizes(optimizer: torch.optim.Optimizer, options: dict[str, object], like: torch.nn.Parameter) -> list[int]:
    failures: list[Exception] = []
    with signals_wait(), without_modes(), tried_out(optimizer):  # a capture traces under a fake-tensor mode of its own
        for size in _tries(optimizer, options, like):
            if not isinstance(size, Exception):
                return size
            failures.append(size)
    kind, error = type(optimizer), failures[-1]
    inner = vars(optimizer).get("optimizer")
    which = f"give its .optimizer, a {type(inner).__name__}, " if isinstance(inner, torch.optim.Optimizer) else ""
    raise UsageError(
        f"the state of {kind.__name__} cannot be foreseen: one of its class, made from its groups and stepped once, "
        f"raised {type(error).__name__} ({error}); {which}give its __init__ defaults, run one optimizer step before "
        "fit, or leave optimizer= out",
        argument="optimizer",
        value=kind,
    ) from failures[-1]


def _tries(
    optimizer: torch.optim.Optimizer, options: dict[str, object], like: torch.nn.Parameter
) -> Iterator[list[int] | Exception]:
    """Bytes of each tensor of the state, or why one way did not find them."""
    for answer in _ANSWERS:
        try:
            with quiet_log(), sizes_only(), numbers_are(answer):
                found = list(storages_in(_state_after(optimizer, options, like, tuple(like.shape))).values())
        except Exception as error:  # any optimizer of the user's may raise anything here
            if raised_by_a_handler(error):
                raise
            yield error
        else:
            yield found
    known: dict[int, int] = dict(zip(_SIZES, like.shape, strict=False))
    shape = tuple(min(pair) for pair in known.items())
    if len(shape) < like.ndim:
        return
    try:
        state = _state_after(optimizer, options, like, shape)
    except Exception as error:  # likewise
        if raised_by_a_handler(error):
            raise
        yield error
    else:
        yield [_scaled_bytes(each, shape, like, known) for each in state]


def _state_after(
    optimizer: torch.optim.Optimizer, options: dict[str, object], like: torch.nn.Parameter, shape: tuple[int, ...]
) -> list[torch.Tensor]:
    """The state of a stand-in for ``like``, after one step."""
    stand_in = torch.nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
    stand_in.grad = torch.zeros_like(stand_in)
    trial = stand_in_of(optimizer, [{**options, "params": [stand_in]}])
    made = [held_by(each)[1] for each in optimizers_in(trial)]  # as the optimizer itself has made them already
    given = {id(each) for each in tensors_in([stand_in, options, made])}
    trial.step()
    kept = tensors_in([held_by(each) for each in optimizers_in(trial)])
    return [each for each in kept if id(each) not in given]


def _scaled_bytes(state: torch.Tensor, shape: tuple[int, ...], like: torch.nn.Parameter, known: dict[int, int]) -> int:
    """Bytes of what ``state``, of a parameter of ``shape``, is for one like ``like``."""
    if state.numel() == math.prod(shape):
        return like.numel() * state.element_size()
    return math.prod(known.get(size, size) for size in state.shape) * state.element_size()

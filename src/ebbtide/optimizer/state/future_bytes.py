"""How many bytes an optimizer's state will take, before its first step has made it; found out without that memory.

1. A stand-in of each distinct parameter is stepped alone, by an optimizer of the same class and options, on fake
   tensors: they have sizes and no memory. A step that asks for a number gets 1 (and 0 where that leads to an error):
   what numbers there are does not change what is kept.
2. A step that fake tensors cannot take (one with kernels or NumPy of its own) is taken by a real stand-in of a few
   elements, whose sizes all differ: a size of its state that is one of these stands for the parameter's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch

from ebbtide.errors import UsageError
from ebbtide.measurement.resident import as_stepping, held_by, optimizers_in, storages_in, tensors_in
from ebbtide.optimizer.state.combined import parts_of
from ebbtide.optimizer.state.options import options_of
from ebbtide.optimizer.state.stand_ins import stand_in_of, tried_out
from ebbtide.signals import raised_by_a_handler, signals_wait
from ebbtide.torch_seams.fake_tensors import numbers_are, quiet_log, sizes_only, without_modes
from ebbtide.torch_seams.optimizers import parameters_stepped_by
from ebbtide.user_objects import is_a

__all__ = ["future_state_bytes", "future_state_sizes"]

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
    return [size for each in parts_of(optimizer) for size in _future_sizes(as_stepping(each))]


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


def _keeps_for_all(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has stepped and keeps state under other names than its parameters."""
    values: list[object] = [state for key, state in optimizer.state.items() if not is_a(key, torch.Tensor)]
    for group in optimizer.param_groups:
        values += [value for key, value in group.items() if key != "params" and is_a(value, list, dict)]
    return any(True for _ in tensors_in(values))


def _keeps_for_others(optimizer: torch.optim.Optimizer, parts: Iterable[torch.optim.Optimizer]) -> bool:
    """Whether one that it holds has stepped other parameters in the place of its own, as of copies in float32."""
    own = set(map(id, parameters_stepped_by(optimizer)))
    return any(
        id(key) not in own and value for each in parts if each is not optimizer for key, value in each.state.items()
    )


def _state_sizes(optimizer: torch.optim.Optimizer, options: dict[str, object], like: torch.nn.Parameter) -> list[int]:
    attempts: list[Callable[..., list[int]]] = [partial(_sizes_on_fakes, answer) for answer in _ANSWERS]
    if like.ndim <= len(_SIZES):
        attempts.append(_sizes_on_few_elements)
    failure: Exception | None = None
    with signals_wait(), without_modes(), tried_out(optimizer):  # a capture traces under a fake-tensor mode of its own
        for attempt in attempts:
            try:
                return attempt(optimizer, options, like)
            except Exception as error:  # any optimizer of the user's may raise anything here
                if raised_by_a_handler(error):
                    raise
                failure = error
    kind, inner = type(optimizer), vars(optimizer).get("optimizer")
    which = f"give its .optimizer, a {type(inner).__name__}, " if is_a(inner, torch.optim.Optimizer) else ""
    raise UsageError(
        f"the state of {kind.__name__} cannot be foreseen: one of its class, made from its groups and stepped once, "
        f"raised {type(failure).__name__} ({failure}); {which}give its __init__ defaults, run one optimizer step "
        "before fit, or leave optimizer= out",
        argument="optimizer",
        value=kind,
    ) from failure


def _sizes_on_fakes(
    answer: int, optimizer: torch.optim.Optimizer, options: dict[str, object], like: torch.nn.Parameter
) -> list[int]:
    """Bytes of each tensor of the state, by definition 1; numbers that are asked for are ``answer``."""
    with quiet_log(), sizes_only(), numbers_are(answer):
        return list(storages_in(_state_after(optimizer, options, like, tuple(like.shape))).values())


def _sizes_on_few_elements(
    optimizer: torch.optim.Optimizer, options: dict[str, object], like: torch.nn.Parameter
) -> list[int]:
    """Bytes of each tensor of the state, by definition 2."""
    sizes: dict[int, int] = dict(zip(_SIZES, like.shape, strict=False))
    shape = tuple(min(pair) for pair in sizes.items())
    return [_scaled_bytes(each, shape, like, sizes) for each in _state_after(optimizer, options, like, shape)]


def _state_after(
    optimizer: torch.optim.Optimizer, options: dict[str, object], like: torch.nn.Parameter, shape: tuple[int, ...]
) -> list[torch.Tensor]:
    """The state of a stand-in for ``like``, after one step."""
    stand_in = torch.nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
    stand_in.grad = torch.zeros_like(stand_in)
    trial = stand_in_of(optimizer, [{**options, "params": [stand_in]}])
    attributes = [held_by(each)[1] for each in optimizers_in(trial)]  # as the optimizer itself has made them already
    before = {id(each) for each in tensors_in([stand_in, options, attributes])}
    trial.step()
    kept = tensors_in([held_by(each) for each in optimizers_in(trial)])
    return [each for each in kept if id(each) not in before]


def _scaled_bytes(state: torch.Tensor, shape: tuple[int, ...], like: torch.nn.Parameter, sizes: dict[int, int]) -> int:
    """Bytes of what ``state``, of a parameter of ``shape``, is for one like ``like``."""
    if state.numel() == math.prod(shape):
        return like.numel() * state.element_size()
    return math.prod(sizes.get(size, size) for size in state.shape) * state.element_size()

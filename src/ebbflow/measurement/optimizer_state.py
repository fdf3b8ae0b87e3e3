"""How many bytes an optimizer's state will take, before its first step has made it; found out without that memory.

1. A stand-in of each distinct parameter is stepped alone, by an optimizer of the same class and options, on fake
   tensors: they have sizes and no memory. A step that asks for a number gets 1 (and 0 where that leads to an error):
   what numbers there are does not change what is kept.
2. A step that fake tensors cannot take (one with kernels or NumPy of its own) is taken by a real stand-in of a few
   elements, whose sizes all differ: a size of its state that is one of these stands for the parameter's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ebbflow.errors import UsageError
from ebbflow.measurement.resident import storages_in, tensors_in
from ebbflow.torch_seams.fake_tensors import FakeTensorMode, numbers_are, quiet_log, without_modes

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
    sizes: dict[tuple[object, ...], list[int]] = {}
    total: list[int] = []
    for position, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            if optimizer.state.get(parameter) or not parameter.requires_grad:
                continue
            key = (position, tuple(parameter.shape), parameter.dtype, parameter.device)
            if key not in sizes:
                try:
                    sizes[key] = _state_sizes(type(optimizer), options, parameter)
                except UsageError:
                    if not any(optimizer.state.values()):
                        raise
                    return total  # it has stepped, and keeps what it needs with other parameters (LBFGS: one)
            total += sizes[key]
    return total


def _state_sizes(kind: type[torch.optim.Optimizer], options: dict[str, object], like: torch.nn.Parameter) -> list[int]:
    failures: list[Exception] = []
    with without_modes():  # a capture traces under a fake-tensor mode of its own
        for size in _tries(kind, options, like):
            if not isinstance(size, Exception):
                return size
            failures.append(size)
    raise UsageError(
        f"the state of {kind.__name__} cannot be foreseen ({failures[-1]}); "
        "run one optimizer step before fit, or leave optimizer= out",
        argument="optimizer",
        value=kind,
    ) from failures[-1]


def _tries(
    kind: type[torch.optim.Optimizer], options: dict[str, object], like: torch.nn.Parameter
) -> Iterator[list[int] | Exception]:
    """Bytes of each tensor of the state, or why one way did not find them."""
    for answer in _ANSWERS:
        try:
            with quiet_log(), FakeTensorMode(allow_non_fake_inputs=True), numbers_are(answer):
                yield list(storages_in([_state_after(kind, options, like, tuple(like.shape))]).values())
        except Exception as error:  # any optimizer of the user's may raise anything here
            yield error
    known: dict[int, int] = dict(zip(_SIZES, like.shape, strict=False))
    shape = tuple(min(pair) for pair in known.items())
    if len(shape) < like.ndim:
        return
    try:
        state = _state_after(kind, options, like, shape)
    except Exception as error:  # likewise
        yield error
    else:
        yield [_scaled_bytes(each, shape, like, known) for each in tensors_in(state)]


def _state_after(
    kind: type[torch.optim.Optimizer], options: dict[str, object], like: torch.nn.Parameter, shape: tuple[int, ...]
) -> dict[str, Any]:
    """The state of a stand-in for ``like``, after one step."""
    stand_in = torch.nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
    stand_in.grad = torch.zeros_like(stand_in)
    trial = kind([{**options, "params": [stand_in]}])  # type: ignore[call-arg]
    trial.step()
    return dict(trial.state[stand_in])


def _scaled_bytes(state: torch.Tensor, shape: tuple[int, ...], like: torch.nn.Parameter, known: dict[int, int]) -> int:
    """Bytes of what ``state``, of a parameter of ``shape``, is for one like ``like``."""
    if state.numel() == math.prod(shape):
        return like.numel() * state.element_size()
    return math.prod(known.get(size, size) for size in state.shape) * state.element_size()

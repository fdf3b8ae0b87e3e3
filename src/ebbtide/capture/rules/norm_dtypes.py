"""The dtypes of what norms of mixed precision return, where torch's descriptions are wrong.

On CPU the kernels of batch, layer and group norm keep mean and deviation in float32 where the input has 16 bits and any
parameter or running statistic is float32, as under autocast (``is_mixed_type``,
aten/src/ATen/native/cpu/mixed_data_type.h; seen in torch 2.11 to 2.13): fake tensors say 16 bits. New running
statistics have the dtype of the old ones, and the backward of group norm gives its input's gradient the input's dtype:
fake tensors say float32 of both where 16 bits went in. What follows in the trace depends on these, so they have to be
right while the step is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ebbtide.torch_seams.fake_tensors import Dispatch, FakeTensor, FakeTensorMode, described_by, fake_device

__all__ = ["is_mixed", "true_norms"]

_aten = torch.ops.aten


def is_mixed(tensors: Sequence[Any]) -> bool:
    """Whether the first tensor has 16 bits an element and another one is float32; what is no tensor is skipped."""
    first, *others = (each for each in tensors if isinstance(each, torch.Tensor))
    return first.is_floating_point() and first.element_size() == 2 and any(o.dtype == torch.float32 for o in others)


def _statistics(args: Sequence[Any]) -> dict[int, torch.dtype]:
    return {1: torch.float32, 2: torch.float32} if is_mixed(args) else {}


def _functional(args: Sequence[Any]) -> dict[int, torch.dtype]:
    running = {place: args[place].dtype for place in (3, 4) if isinstance(args[place], torch.Tensor)}
    return {**_statistics(args), **running}


def _group_norm_backward(args: Sequence[Any]) -> dict[int, torch.dtype]:
    return {0: args[1].dtype}


_CORRECTED: dict[object, Callable[[Sequence[Any]], dict[int, torch.dtype]]] = {
    _aten.native_layer_norm.default: _statistics,
    _aten.native_group_norm.default: _statistics,
    _aten.native_batch_norm.default: _statistics,
    _aten._native_batch_norm_legit.default: _statistics,
    _aten._native_batch_norm_legit.no_stats: _statistics,
    _aten._native_batch_norm_legit_functional.default: _functional,
    _aten.native_group_norm_backward.default: _group_norm_backward,
}
"""From an operator's arguments to the dtypes of results that the description gets wrong, by position."""


@contextmanager
def true_norms() -> Iterator[None]:
    """While open, what norms return in fake tensors on this thread has the dtypes that the kernels give."""
    with described_by(_of_kernels, name="norms"):
        yield


def _of_kernels(described: Dispatch) -> Dispatch:
    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        results = described(mode, func, types, args, kwargs)
        if func not in _CORRECTED or not isinstance(results, tuple) or not isinstance(args[0], FakeTensor):
            return results
        if fake_device(args[0]).type != "cpu":
            return results
        dtypes = _CORRECTED[func]([*args, *kwargs.values()])
        with mode:
            return tuple(
                each.to(dtypes[place]) if place in dtypes and isinstance(each, torch.Tensor) else each
                for place, each in enumerate(results)
            )

    return dispatch

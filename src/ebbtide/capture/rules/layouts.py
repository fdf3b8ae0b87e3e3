"""The strides that kernels really give their results, where torch's own description of them is not to be trusted.

A capture sees fake tensors, whose strides come from Python decompositions for some ops. Those of batch, layer and
group norm, of several activations' backwards and losses' backwards, of ``roll`` and ``copysign`` keep an input's
strides where the kernel returns a contiguous tensor (found by comparing both over input layouts, torch 2.13 on
CPU). A plan made from wrong strides would read wrong elements: what autograd does next depends on them as well, so
they have to be right while the step is traced and cannot be repaired after it.

Rule: an op with an argument that is not contiguous is run once on synthetic inputs, and its fake results take the
strides of the real ones. With contiguous arguments no difference has been seen; ``profile.py`` checks every op.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ebbtide.cost.call import call_with, same_strides
from ebbtide.cost.profile import run_alone
from ebbtide.cost.profiling_budget import NotProfiled
from ebbtide.signals import raised_by_a_handler
from ebbtide.torch_seams import trees as pytree
from ebbtide.torch_seams.dispatcher import OpOverload, is_composite, schema_of
from ebbtide.torch_seams.fake_tensors import (
    Dispatch,
    FakeTensor,
    FakeTensorMode,
    described_by,
    fake_device,
    forget_descriptions,
    has_symbolic_sizes,
    kernel_choices,
    unremembered,
    without_modes,
)

__all__ = ["true_layouts"]

_aten = torch.ops.aten
# Results of products are contiguous whatever the arguments' strides are; as the longest ops they are not worth a run.
# Copies, and what their decompositions call, are described by the code that makes them, on a device without memory. A
# run would take what is copied once more, and the budget may be kept by a rewrite of this very copy: of logits that
# are cut, as large as anything in the step.
_DESCRIBED = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.clone.default,
        _aten._to_copy.default,
    }
)


class _OfThread(threading.local):
    """Whether a kernel could not be asked since layouts were last true, for want of room."""

    had_no_room = False


_here = _OfThread()
_Strides = tuple[tuple[int, ...] | None, ...]
_measured: dict[tuple[object, ...], _Strides] = {}


def _is_suspect(func: object, tensors: list[FakeTensor]) -> bool:
    if not isinstance(func, OpOverload) or func.namespace == "prims":
        return False
    if schema_of(func).is_mutable or func.is_view or is_composite(func):
        return False
    if any(has_symbolic_sizes(t) or not _is_here(fake_device(t)) for t in tensors):
        return False
    return any(not t.is_contiguous() and t.numel() for t in tensors)


def _is_here(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


def _true_strides(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], fakes: list[Any]) -> _Strides:
    """Per result its strides on the device, ``None`` where they cannot be told."""
    call = call_with(func, args, kwargs, fakes)
    key = (call.signature, *kernel_choices())
    if key in _measured:
        return _measured[key]
    unknown: _Strides = (None,) * len(fakes)
    try:
        with without_modes():
            reals = pytree.tree_leaves(run_alone(call))
    except (NotProfiled, MemoryError, torch.OutOfMemoryError):  # another time there may be room
        _here.had_no_room = True
        return unknown
    except Exception as error:  # a kernel may refuse synthetic inputs; then the description stands
        if raised_by_a_handler(error):
            raise
        reals = []
    found = tuple(tuple(r.stride()) if isinstance(r, torch.Tensor) else None for r in reals)
    _measured[key] = found if len(found) == len(fakes) else unknown
    return _measured[key]


def _corrected(mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: Any, result: Any) -> Any:
    fakes, spec = pytree.tree_flatten(result)
    for position, strides in enumerate(_true_strides(func, args, kwargs, fakes)):
        fake = fakes[position]
        if not isinstance(fake, FakeTensor) or strides is None or len(strides) != fake.dim():
            continue
        if not same_strides(fake.shape, fake.stride(), strides):
            with mode:
                fakes[position] = torch.empty_strided(
                    fake.shape, strides, dtype=fake.dtype, device=fake_device(fake), requires_grad=fake.requires_grad
                )
    return pytree.tree_unflatten(fakes, spec)


@contextmanager
def true_layouts() -> Iterator[None]:
    """While open, fake tensors of this thread have the strides that the kernels give."""
    try:
        with described_by(_measured_where_suspect, name="layouts"):
            yield
    finally:
        if _here.had_no_room:  # what was described instead is not to be kept for captures that have room
            _here.had_no_room = False
            forget_descriptions()


def _measured_where_suspect(described: Dispatch) -> Dispatch:
    inside: list[FakeTensorMode] = []  # a decomposition calls further ops, which nobody else sees

    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, FakeTensor)]
        if inside or not _is_suspect(func, tensors):
            return described(mode, func, types, args, kwargs)
        inside.append(mode)
        try:
            if func in _DESCRIBED:
                return described(mode, func, types, args, kwargs)
            with unremembered():
                result = described(mode, func, types, args, kwargs)
                return result if result is NotImplemented else _corrected(mode, func, args, kwargs, result)
        finally:
            inside.pop()

    return dispatch

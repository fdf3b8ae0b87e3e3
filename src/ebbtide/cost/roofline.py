"""Seconds of an op on a machine that is not at hand: the roofline.

An op takes at least its arithmetic at the machine's peak and at least its traffic at the memory's bandwidth,
whichever is longer, and a launch besides (Williams, Waterman and Patterson, "Roofline: an insightful visual
performance model for multicore architectures", CACM 52(4), 2009). This is a bound on what hardware allows, so
real ops are slower, large and small ones by different factors: plans that rest on it are estimates and say so.

1. Arithmetic: PyTorch's own formulas (``torch.utils.flop_counter``) for products, convolutions and attention;
   everything else counts as traffic only.
2. Traffic: every tensor argument is read once and every output written once. A tensor counts the elements that
   it reaches in its storage, not the elements it shows, so an expanded tensor counts once.
3. An op that gathers rows reads from its table no more than it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ebbtide.cost.call import Call, TensorSpec
from ebbtide.cost.priced import Priced
from ebbtide.step.machine import Machine
from ebbtide.torch_seams.dispatcher import flop_registry, sdpa_backward_flop, sdpa_flop

__all__ = ["flops_of", "roofline_seconds", "traffic_bytes"]

aten = torch.ops.aten


def _convolution_backward(grad_output: Any, x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """Each wanted gradient takes the multiply-adds of the forward, for any number of groups.

    PyTorch's formula counts the weight gradient of a grouped convolution ``groups`` times.
    """
    transposed, output_mask = args[4], args[7]
    # One multiply-add per weight, sample and position: of the output, or of the input if it is transposed.
    positions = (x if transposed else grad_output).shape[2:]
    forward = 2 * x.shape[0] * math.prod(positions) * weight.numel()
    return forward * (int(output_mask[0]) + int(output_mask[1]))


def _for_each_head(formula: Callable[..., int], first: int) -> Callable[..., int]:
    """PyTorch's formula for attention, which refuses heads that share keys: what is computed is the same.

    Args:
        formula: of tensors.
        first: position of the query, which is followed by key and value.
    """

    def count(*args: Any, **kwargs: Any) -> int:
        given, query = list(args), args[first]
        for place in (first + 1, first + 2):
            batch, _, *rest = given[place].shape
            given[place] = given[place].new_empty((batch, query.shape[1], *rest))
        return int(formula(*given, **kwargs))

    return count


# What the registry does not have, or counts otherwise than we need.
_OWN_FLOPS: dict[Any, Callable[..., int]] = {
    aten.convolution_backward: _convolution_backward,
    **{
        getattr(aten, f"_scaled_dot_product_{kernel}{suffix}"): _for_each_head(formula, first)
        for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
        for suffix, formula, first in (("", sdpa_flop, 0), ("_backward", sdpa_backward_flop, 1))
    },
}

# Definition 3: the argument that is read in part.
_GATHERS = {aten.embedding: 0, aten.index: 0, aten.index_select: 0, aten.gather: 0}


def _tensors(value: Any) -> Iterator[TensorSpec]:
    """All tensors in nested arguments, in order."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _meta(value: Any) -> Any:
    """Nested arguments with meta tensors, which have a shape and no storage: what the formulas take."""
    if isinstance(value, TensorSpec):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return [_meta(item) for item in value]
    return value


def _packet(call: Call) -> Any:
    """The overload packet of the call, which is what formulas are registered under."""
    return getattr(call.target, "overloadpacket", call.target)


def flops_of(call: Call) -> int:
    """Floating-point operations of one call by PyTorch's formulas; 0 for ops that they do not know.

    Source: ``torch.utils.flop_counter`` (a multiply-add counts as two; causal attention counts as full).
    """
    packet = _packet(call)
    formula = _OWN_FLOPS.get(packet) or flop_registry.get(packet)
    if formula is None:
        return 0
    outputs = _meta(call.outputs)
    kwargs = {key: _meta(value) for key, value in call.kwargs.items()}
    return int(formula(*_meta(call.args), out_val=outputs[0] if len(outputs) == 1 else outputs, **kwargs))


def _bytes(spec: TensorSpec) -> int:
    """Bytes of the elements that a tensor reaches: definition 2."""
    return min(spec.numel, spec.extent) * spec.dtype.itemsize


def traffic_bytes(call: Call) -> int:
    """Bytes that one call reads and writes at least: definitions 2 and 3."""
    if isinstance(call.target, Priced):
        return call.target.traffic_bytes(call.args)
    written = sum(_bytes(spec) for spec in call.outputs)
    part = _GATHERS.get(_packet(call))
    total = written
    for position, value in enumerate((*call.args, call.kwargs)):
        read = sum(_bytes(spec) for spec in _tensors(value))
        total += min(read, written) if position == part else read
    return total


def _arithmetic_dtype(call: Call) -> str:
    """Name of the dtype that the machine computes in: that of the first floating-point argument or output."""
    for spec in (*_tensors(call.args), *_tensors(call.kwargs), *call.outputs):
        if spec.dtype.is_floating_point:
            return str(spec.dtype).removeprefix("torch.")
    return "float32"


def roofline_seconds(call: Call, machine: Machine) -> float:
    """Seconds that ``call`` takes on ``machine`` by the roofline.

    Args:
        call: one op with its tensors as shape, stride and dtype.
        machine: whose peaks are used; float32's peak for a dtype that it does not list.

    Returns:
        launch + max(arithmetic, traffic), seconds.
    """
    arithmetic = flops_of(call) / machine.flops_for(_arithmetic_dtype(call))
    traffic = traffic_bytes(call) / machine.bytes_per_second
    return machine.launch_seconds + max(arithmetic, traffic)

"""Attention as CUDA computes it: which of PyTorch's kernels a call gets there, and that kernel's own op.

``F.scaled_dot_product_attention`` is one composite op; what it becomes is decided per device. On CUDA the choice is
``select_sdp_backend`` (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.13), and what is done around the
chosen kernel is ``scaled_dot_product_attention`` (aten/src/ATen/native/transformers/attention.cpp). Both are written
here for tensors that are not on CUDA. The conditions, in the order in which kernels are tried:

1. All fused kernels take four dimensions, no empty sequence, and a last dimension (also of the mask) of stride 1.
2. cuDNN's comes first on compute capabilities 9.0, 10.0 and 10.3 (with a cuDNN later than 9.15, which PyTorch's wheels
   for CUDA 13 bring), if it is allowed, algorithms need not be deterministic, and shapes are among cuDNN's.
3. Flash takes 16-bit dtypes from capability 8.0 on, no mask, equal head dimensions up to 256, and the causal flag for
   equal lengths only.
4. The memory-efficient one takes masks and float32; bfloat16 from capability 8.0 on; no grouped heads.
5. What is left is the composite of products and softmax, which is the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.backends import cuda as settings

__all__ = ["Attention", "attention_as_on_cuda", "kernel_for"]

_aten = torch.ops.aten
Kernel = Literal["cudnn", "flash", "efficient", "math"]

_FUSED_CAPABILITIES = ((8, 0), (12, 1))
_EFFICIENT_CAPABILITIES = ((5, 0), (12, 1))
_PREFER_CUDNN = frozenset({(9, 0), (10, 0), (10, 3)})
_NARROW_FLASH_BACKWARD = (((8, 6), (8, 9)), ((12, 0), (12, 1)))  # little shared memory: no backward at 193 to 224
_HALF = (torch.float16, torch.bfloat16)
_MASK_ALIGNMENT = 8  # mem_eff_alignment of attention.cpp
_HEAD_ALIGNMENT = 8  # pad_last_dim of attention.cpp


@dataclass(frozen=True)
class Attention:
    """One call of ``scaled_dot_product_attention``: its arguments under their own names."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    grouped: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def needs_gradient(self) -> bool:
        """Whether query, key or value takes a gradient."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)


def kernel_for(call: Attention, capability: tuple[int, int]) -> Kernel:
    """The kernel that CUDA's choice gives to ``call`` on a device of this compute capability."""
    tried: list[tuple[Kernel, Callable[[Attention, tuple[int, int]], bool]]] = [
        ("flash", _takes_flash),
        ("efficient", _takes_efficient),
    ]
    if capability in _PREFER_CUDNN:
        tried.insert(0, ("cudnn", _takes_cudnn))
    fits = all(t.dim() == 4 for t in call.tensors) and all(t.shape[2] for t in call.tensors)
    for name, takes in tried:
        if fits and takes(call, capability):
            return name
    return "math"


def _within(capability: tuple[int, int], limits: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    return limits[0] <= capability <= limits[1]


def _has_unit_strides(call: Attention, *, ignore_singleton: bool) -> bool:
    """Condition 1; one kernel insists on stride 1 even where the last dimension has one element."""
    of_tensors = all(t.stride(-1) == 1 for t in call.tensors) or (ignore_singleton and call.query.shape[-1] == 1)
    return of_tensors and (call.mask is None or call.mask.stride(-1) == 1)


def _has_dtype(call: Attention, dtypes: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype in dtypes and len({t.dtype for t in call.tensors}) == 1


def _heads_match(call: Attention, *, groups: bool, same_key_and_value: bool = True) -> bool:
    heads, key_heads, value_heads = (t.shape[1] for t in call.tensors)
    if len({t.shape[0] for t in call.tensors}) != 1:
        return False
    if not (call.grouped and groups):
        return heads == key_heads == value_heads
    if same_key_and_value and key_heads != value_heads:
        return False
    return heads % key_heads == 0 and heads % value_heads == 0


def _takes_flash(call: Attention, capability: tuple[int, int]) -> bool:
    width = call.query.shape[-1]
    if any(t.shape[-1] != width for t in call.tensors) or width > 256 or call.mask is not None:
        return False
    narrow = call.needs_gradient and any(_within(capability, limits) for limits in _NARROW_FLASH_BACKWARD)
    if narrow and (192 < width <= 224 or (width > 224 and call.dropout > 0)):
        return False
    if call.causal and call.query.shape[2] != call.key.shape[2]:
        return False
    return (
        settings.flash_sdp_enabled()
        and _within(capability, _FUSED_CAPABILITIES)
        and _has_dtype(call, _HALF)
        and _heads_match(call, groups=True)
        and _has_unit_strides(call, ignore_singleton=True)
    )


def _takes_efficient(call: Attention, capability: tuple[int, int]) -> bool:
    half = call.query.dtype in _HALF
    alignment = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and half):  # on tensor cores, 128 bits at a time
        alignment = max(alignment, 8 if half else 4)
    widths = [t.shape[-1] for t in call.tensors]
    if widths[0] != widths[1] or any(width == 0 or width % alignment for width in widths):
        return False
    dtypes = (*_HALF, torch.float32) if capability >= (8, 0) else (torch.float16, torch.float32)
    return (
        settings.mem_efficient_sdp_enabled()
        and _within(capability, _EFFICIENT_CAPABILITIES)
        and _has_dtype(call, dtypes)
        and _heads_match(call, groups=False)
        and _has_unit_strides(call, ignore_singleton=False)
    )


def _takes_cudnn(call: Attention, capability: tuple[int, int]) -> bool:
    query, key, value = call.tensors
    widest = 256 if capability == (9, 0) else 128
    if capability[0] == 10 and (query.shape[-1], value.shape[-1]) == (192, 128):
        widest = 192
    if any(t.shape[-1] > widest or t.shape[-1] % 8 for t in (query, value)):
        return False
    if key.shape[2] == 1 or (query.shape[2] == 1 and call.dropout > 0):
        return False
    return (
        settings.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and _has_dtype(call, _HALF)
        and _is_cudnn_mask(call)
        and _heads_match(call, groups=True, same_key_and_value=False)
        and _has_unit_strides(call, ignore_singleton=True)
    )


def _is_cudnn_mask(call: Attention) -> bool:
    """Whether the mask takes no gradient and has two or four dimensions that fit or are 1."""
    mask = call.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    full = (*call.query.shape[:2], call.query.shape[2], call.key.shape[2])
    return all(mine in (1, theirs) for mine, theirs in zip(mask.shape, full[4 - mask.dim() :], strict=True))


def attention_as_on_cuda(call: Attention, capability: tuple[int, int]) -> tuple[torch.Tensor, Kernel]:
    """``call`` computed by the op that CUDA's choice gives it, and that choice's name."""
    kernel = kernel_for(call, capability)
    compute = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _math}[kernel]
    return compute(call), kernel


def _additive(call: Attention, lowest: float) -> torch.Tensor | None:
    """The mask as numbers to add: what may be attended to is 0, the rest ``lowest``."""
    if call.mask is None or call.mask.dtype != torch.bool:
        return call.mask
    rest = torch.scalar_tensor(lowest, dtype=call.query.dtype, device=call.mask.device)
    return torch.where(call.mask, 0.0, rest)


def _flash(call: Attention) -> torch.Tensor:
    width = call.query.shape[-1]
    scale = width**-0.5 if call.scale is None else call.scale
    pad = -width % _HEAD_ALIGNMENT
    query, key, value = (torch.nn.functional.pad(t, (0, pad)) if pad else t for t in call.tensors)
    flash = _aten._scaled_dot_product_flash_attention.default
    output = flash(query, key, value, call.dropout, call.causal, False, scale=scale)[0]
    return output[..., :width] if pad else output


def _efficient(call: Attention) -> torch.Tensor:
    mask = _additive(call, -torch.inf)
    if mask is not None:
        mask = _aligned(mask).expand(*call.query.shape[:3], call.key.shape[2])
    efficient = _aten._scaled_dot_product_efficient_attention.default
    return efficient(*call.tensors, mask, call.needs_gradient, call.dropout, call.causal, scale=call.scale)[0]


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """``mask`` with rows that start at multiples of 16 bytes, or its copy that has them."""
    if all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1:
        return mask
    length = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]


def _cudnn(call: Attention) -> torch.Tensor:
    mask = _additive(call, -torch.inf)
    cudnn = _aten._scaled_dot_product_cudnn_attention.default
    return cudnn(*call.tensors, mask, call.needs_gradient, call.dropout, call.causal, False, scale=call.scale)[0]


def _math(call: Attention) -> torch.Tensor:
    mask = _additive(call, -torch.inf)
    math = _aten._scaled_dot_product_attention_math.default
    return math(*call.tensors, mask, call.dropout, call.causal, None, scale=call.scale, enable_gqa=call.grouped)[0]

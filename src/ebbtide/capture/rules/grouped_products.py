"""Grouped matrix products of other dtypes than bfloat16, which torch's description refuses and its CPU kernel computes.

``torch.nn.functional.grouped_mm`` is what transformers' mixtures of experts are made of in eager. The description is
that of CUDA's fast kernel (``_meta_grouped_mm_common``, torch 2.13): it raises for every other dtype, as if the kernel
did. On CPU the kernel takes float32 and float16 as well, of matrices that it can read 16 bytes at a time; rows of its
result begin at multiples of 16 bytes too (``_create_grouped_mm_output_tensor``). What it refuses is left to torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ebbtide.torch_seams.fake_tensors import Dispatch, FakeTensor, FakeTensorMode, described_by, fake_device

__all__ = ["true_grouped_products"]

_PRODUCT = torch.ops.aten._grouped_mm.default
_ALIGNMENT_BYTES = 16


@contextmanager
def true_grouped_products() -> Iterator[None]:
    """While open, grouped products of fake CPU tensors on this thread are described in every dtype of the kernel's."""
    with described_by(_of_kernels, name="grouped products"):
        yield


def _of_kernels(described: Dispatch) -> Dispatch:
    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is not _PRODUCT or not _is_computed(args):
            return described(mode, func, types, args, kwargs)
        one, other = args[:2]
        offsets = args[2] if len(args) > 2 else (kwargs or {}).get("offs")
        shape = _shape(one, other, offsets)
        row = -(-shape[-1] * one.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES // one.element_size()
        strides = (shape[-2] * row, row, 1)[-len(shape) :]
        with mode:
            return torch.empty_strided(shape, strides, dtype=one.dtype, device=fake_device(one))

    return dispatch


def _is_computed(args: Sequence[Any]) -> bool:
    """Whether the CPU kernel takes what torch's description does not."""
    pair = args[:2]
    if not all(isinstance(each, FakeTensor) and fake_device(each).type == "cpu" for each in pair):
        return False
    return (
        pair[0].dtype in (torch.float32, torch.float16) and pair[0].dtype is pair[1].dtype and all(map(_aligned, pair))
    )


def _aligned(matrices: FakeTensor) -> bool:
    inner, outer = sorted(matrices.stride()[-2:])
    return matrices.dim() in (2, 3) and inner == 1 and outer * matrices.element_size() % _ALIGNMENT_BYTES == 0


def _shape(one: FakeTensor, other: FakeTensor, offsets: FakeTensor | None) -> tuple[int, ...]:
    """A product for each group of columns and rows, of groups of rows, of groups of columns, or one for one."""
    if one.dim() == other.dim() == 2:
        assert offsets is not None
        return (offsets.shape[0], one.shape[0], other.shape[1])
    if one.dim() == 2:
        return (one.shape[0], other.shape[-1])
    return (one.shape[1], other.shape[1]) if other.dim() == 2 else (*one.shape[:2], other.shape[-1])

"""Operators that torch writes in Python for its traces, captured as the one call that they are in eager.

A trace asks an operator for a kernel in Python (``py_kernels``) before it takes the compiled one. Some of these are
decompositions: another order of summation, hence other bits, and a dozen results where eager has one. While a step is
captured they are out of force, but for products of symbolic sizes on older releases (``torch_seams.products``). No
other decompositions are in force: AOTAutograd is given no table of them (``torch_seams.aot``), and Dynamo's own are
switched off (``torch_seams.dynamo``).

Left in force, since they change neither bits nor bytes or have no other form:
1. views, shapes and zeros alone: ``broadcast_tensors``, ``tensor_split`` by a tensor, ``unsafe_chunk``, ``empty.out``,
   and ``to_dense`` of a dense tensor, which it gives back or casts;
2. ``one_hot`` and ``istft``, whose compiled kernels read a value to check it, and ``pad_sequence``, whose compiled
   kernel writes its result row by row;
3. ``native_batch_norm``, whose schema hides that it changes running statistics;
4. ``cudnn_batch_norm``, for the same reason another's work (``cuda.batch_norm``), dropout and the recurrent operators,
   which have rules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ebbtide.torch_seams.dispatcher import OpOverload, traced_as_compiled
from ebbtide.torch_seams.products import symbols_stay_in_python

__all__ = ["LEFT_IN_PYTHON", "RESTORED", "eager_kernels"]

RESTORED = (
    *(f"upsample_nearest{n}d.{form}" for n in (1, 2, 3) for form in ("default", "vec")),
    *(f"_upsample_nearest_exact{n}d.{form}" for n in (1, 2, 3) for form in ("default", "vec")),
    *(f"upsample_{kind}.vec" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(f"_upsample_{kind}2d_aa.vec" for kind in ("bilinear", "bicubic", "lanczos")),
    "upsample_bilinear2d.default",
    "upsample_bicubic2d.default",
    "hardshrink.default",
    "softshrink.default",
    "multi_margin_loss.default",
    "multilabel_margin_loss_forward.default",
    "matmul.default",
    "stft.center",
)
"""Operators of ``torch.ops.aten`` that are traced by their compiled kernels, where a release has one in Python."""

LEFT_IN_PYTHON = frozenset(
    {
        *("broadcast_tensors.default", "tensor_split.tensor_indices_or_sections", "unsafe_chunk.default", "empty.out"),
        "to_dense.default",
        *("one_hot.default", "istft.default", "pad_sequence.default", "matmul.out"),
        *("native_batch_norm.default", "cudnn_batch_norm.default", "dropout.default"),
        *(f"{name}.{form}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")),
    }
)
"""Operators whose kernels in Python stay in force, by the reasons above."""


@contextmanager
def eager_kernels() -> Iterator[None]:
    """While open, this thread traces what eager calls."""
    with ExitStack() as stack:
        for op in filter(None, map(_find, RESTORED)):
            unless = symbols_stay_in_python if op is torch.ops.aten.matmul.default else None
            stack.enter_context(traced_as_compiled(op, unless))
        yield


def _find(name: str) -> OpOverload | None:
    packet, form = name.split(".")
    return getattr(getattr(torch.ops.aten, packet, None), form, None)

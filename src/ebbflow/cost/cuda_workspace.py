"""Bytes that CUDA kernels take from the allocator while they run, for a machine that is not at hand.

Only what the sources of PyTorch's own kernels say (torch 2.13); where a size depends on data or on the kernel's
variant, the largest that it can be. cuDNN chooses its convolutions' workspaces itself, so these are not counted, and
a plan says for how many ops. Rounding is up to the allocator's granularity, tensor by tensor.

1. Flash attention's backward (flash_attn/flash_api.cpp, ``mha_bwd``): float32 sums of the queries' gradient and one
   float32 per row, lengths rounded up to 128 and widths to 32; where heads share keys, the gradients of key and value
   per query head. cuDNN's backward is counted like it: its own sizes are not published.
2. The memory-efficient backward (mem_eff_attention/kernel_backward.h): one float32 per row; for 16 bits float32 sums
   of the queries' gradient, and beyond a width of 128 of keys' and values' as well; for float32 the product from which
   the rows' numbers are summed.
3. The backward of an embedding of more than 3,072 rows (Embedding.cu, EmbeddingBackwardKernel.cu): indices sorted
   with their places and three lists as long, and partial sums, at most one row for each index.
4. ``index_put`` that adds (Indexing.cu): linear indices, sorted, with their places: four lists of 64 bits.
5. cuBLAS has one workspace per thread and stream, taken at its first product and never given back
   (CublasHandlePool.cpp): 32 MiB on capabilities 9, 10 and 12, else 8,519,680 bytes, unless that machine's environment
   sets ``CUBLAS_WORKSPACE_CONFIG``. A backward runs on autograd's own thread, so a step has two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ebbflow.cost.call import Call, TensorSpec
from ebbflow.step.machine import Machine
from ebbflow.step.program import Program

__all__ = ["NOT_COUNTED", "cublas_bytes", "workspace_bytes"]

_aten = torch.ops.aten

_SMALL_EMBEDDING = 3072
_WIDEST_IN_REGISTERS = 128
_STEP_THREADS = 2  # the caller's and autograd's

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot"})
NOT_COUNTED = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})
"""Targets whose workspace cuDNN decides."""


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _flash_backward(call: Call) -> list[int]:
    _, query, key, value = call.args[:4]
    batch, heads, rows, width = query.shape
    rows, padded = _up(rows, 128), _up(width, 32)
    sizes = [4 * batch * heads * rows * padded, 4 * batch * heads * rows]
    if key.shape[1] != heads:
        sizes += [each.dtype.itemsize * batch * heads * each.shape[2] * each.shape[3] for each in (key, value)]
    return sizes


def _efficient_backward(call: Call) -> list[int]:
    grad, query, key, value = call.args[:4]
    batch, heads, rows, width = query.shape
    sizes = [4 * batch * heads * rows]
    if query.dtype == torch.float32:
        return [*sizes, 4 * grad.numel]
    sums = 4 * batch * heads * _up(rows, 128) * _up(width, 128)
    if max(width, value.shape[3]) > _WIDEST_IN_REGISTERS:
        sums += sum(4 * batch * heads * _up(each.shape[2], 128) * _up(each.shape[3], 128) for each in (key, value))
    return [*sizes, sums]


def _embedding_backward(call: Call) -> list[int]:
    grad, indices = call.args[:2]
    count = indices.numel
    if count <= _SMALL_EMBEDDING:
        return []
    return [*[8 * count] * 5, 4 * count * grad.shape[-1]]


def _index_put(call: Call) -> list[int]:
    indices = [each for each in call.args[1] if isinstance(each, TensorSpec)]
    adds = len(call.args) > 3 and call.args[3] is True
    return [8 * max(each.numel for each in indices)] * 4 if adds and indices else []


_SIZES: Mapping[object, Callable[[Call], list[int]]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.index_put.default: _index_put,
    _aten._unsafe_index_put.default: _index_put,
}


def workspace_bytes(call: Call, machine: Machine) -> int:
    """Bytes of ``call``'s workspace on ``machine``: 0 where it takes none and where it is not counted."""
    sizes = _SIZES.get(call.target)
    return 0 if sizes is None else sum(machine.round_up(size) for size in sizes(call))


def cublas_bytes(program: Program, machine: Machine) -> int:
    """Bytes that cuBLAS holds from the step's first product on (definition 5); 0 without a product."""
    targets = {op.target for op in program.ops}
    if not any(target.startswith("aten.") and target.split(".")[1] in _PRODUCTS for target in targets):
        return 0
    large = machine.compute_capability[0] in (9, 10, 12)
    return _STEP_THREADS * machine.round_up(32 * 2**20 if large else (2 * 4096 + 8 * 16) * 1024)

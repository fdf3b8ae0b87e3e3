"""Bytes that CUDA kernels take from the allocator while they run, for a machine that is not at hand.

Only what the sources of PyTorch's own kernels say (torch 2.13); where a size depends on data or on the kernel's
variant, the largest that it can be. cuDNN chooses its convolutions' workspaces itself, so these are not counted, and
a plan says for how many ops. Rounding is up to the allocator's granularity, tensor by tensor.

1. Flash attention's backward (flash_attn/flash_api.cpp, ``mha_bwd``): float32 sums of the queries' gradient, as often
   as multiprocessors share a head where algorithms have to be deterministic, and one float32 per row, lengths rounded
   up to 128 and widths to 32; where heads share keys, the gradients of key and value per query head; copies of its
   gradient and its result where these do not lie row by row. cuDNN's backward is counted like it, without the copies:
   its own sizes are not published (seen on an H200: the same and one block).
2. The memory-efficient backward (mem_eff_attention/kernel_backward.h): one float32 per row; for 16 bits float32 sums
   of the queries' gradient, and beyond a width of 128 of keys' and values' as well; for float32 the product from which
   the rows' numbers are summed, twice where rows do not fill blocks, and two more numbers per row.
3. The backward of an embedding of more than 3,072 rows (Embedding.cu, EmbeddingBackwardKernel.cu): indices sorted
   with their places, the rows' beginnings and counts, and partial sums of up to ten rows each: as many as there can be.
4. ``index_put`` that adds (Indexing.cu): linear indices, sorted, with their places: six lists of 64 bits, and what
   sorting takes.
5. Batch norm of channels-last tensors in training (``capture.cuda.batch_norm``): cuDNN's sizes are not published; seen
   on an H200 with cuDNN 9.19 for 64 channels and one row at most 8.2 bytes forward and 5.5 backward, and some KB.
6. cuBLAS has one workspace per thread and stream, taken at its first product and never given back
   (CublasHandlePool.cpp): 32 MiB on capabilities 9, 10 and 12, else 8,519,680 bytes, unless that machine's environment
   sets ``CUBLAS_WORKSPACE_CONFIG``. A backward runs on autograd's own thread, so a step has two.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping

import torch

from ebbtide.cost.call import Call, TensorSpec, same_strides
from ebbtide.step.machine import Machine
from ebbtide.step.program import Program

__all__ = ["NOT_COUNTED", "cublas_bytes", "cublas_bytes_here", "has_product", "workspace_bytes"]

_aten = torch.ops.aten

_SMALL_EMBEDDING = 3072
_WIDEST_IN_REGISTERS = 128
_EFFICIENT_BLOCK = 64
_ROWS_OF_A_SUM = 10  # NROWS_PER_THREAD
_SORTING_BYTES = 1024
_CHANNELS_OF_A_TILE = 64
_BATCH_NORMS = {
    "ebbtide_cuda.batch_norm.default": 8.2,
    "ebbtide_cuda.batch_norm_again.default": 8.2,
    "ebbtide_cuda.batch_norm_backward.default": 5.5,
}
"""Bytes of a row of a tile (definition 5)."""
_MULTIPROCESSORS = {(7, 0): 80, (8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 152, (12, 0): 188}
"""Of the largest card of each capability: RTX A6000, L40S, GB200, RTX PRO 6000 and the like."""
_MOST_MULTIPROCESSORS = 188
_CUBLAS_LT_BYTES = 2**20
_STEP_THREADS = 2  # the caller's and autograd's

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot"})
NOT_COUNTED = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})
"""Targets whose workspace cuDNN decides."""


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _flash_backward(call: Call, machine: Machine) -> list[int]:
    _, query, key, value = call.args[:4]
    batch, heads, rows, width = query.shape
    rows, padded = _up(rows, 128), _up(width, 32)
    sums = 4 * batch * heads * rows * padded
    if torch.are_deterministic_algorithms_enabled():
        sums *= -(-_MULTIPROCESSORS.get(machine.compute_capability, _MOST_MULTIPROCESSORS) // (batch * heads))
    sizes = [sums, 4 * batch * heads * rows]
    if key.shape[1] != heads:
        sizes += [each.dtype.itemsize * batch * heads * each.shape[2] * each.shape[3] for each in (key, value)]
    return sizes


def _flash_backward_and_copies(call: Call, machine: Machine) -> list[int]:
    copied = [each for each in (call.args[0], call.args[4]) if not _by_rows(each)]
    return _flash_backward(call, machine) + [each.dtype.itemsize * each.numel for each in copied]


def _by_rows(tensor: TensorSpec) -> bool:
    """Whether a tensor of batch x heads x rows x width has all heads of a row beside each other."""
    _, heads, rows, width = tensor.shape
    return same_strides(tensor.shape, tensor.stride, (rows * heads * width, width, heads * width, 1))


def _cudnn_backward(call: Call, machine: Machine) -> list[int]:
    return [*_flash_backward(call, machine), 1]


def _efficient_backward(call: Call, machine: Machine) -> list[int]:
    grad, query, key, value = call.args[:4]
    batch, heads, rows, width = query.shape
    sizes = [4 * batch * heads * rows]
    if query.dtype == torch.float32:
        full = rows % _EFFICIENT_BLOCK == 0
        return [*sizes, *[4 * batch * heads * _up(rows, _EFFICIENT_BLOCK)] * 2, *[4 * grad.numel] * (1 if full else 2)]
    sums = 4 * batch * heads * _up(rows, 128) * _up(width, 128)
    if max(width, value.shape[3]) > _WIDEST_IN_REGISTERS:
        sums += sum(4 * batch * heads * _up(each.shape[2], 128) * _up(each.shape[3], 128) for each in (key, value))
    return [*sizes, sums]


def _embedding_backward(call: Call, machine: Machine) -> list[int]:
    grad, indices, rows = call.args[:3]
    count = indices.numel
    if count <= _SMALL_EMBEDDING:
        return []
    distinct = min(count, rows)
    partial = distinct + -(-count // _ROWS_OF_A_SUM)
    return [*[8 * count] * 3, *[8 * distinct] * 2, 8 * partial, 4 * partial * grad.shape[-1], _SORTING_BYTES]


def _index_put(call: Call, machine: Machine) -> list[int]:
    indices = [each for each in call.args[1] if isinstance(each, TensorSpec)]
    adds = len(call.args) > 3 and call.args[3] is True
    if not adds or not indices:
        return []
    count = max(each.numel for each in indices)
    return [*[8 * count] * 6, count // 4 + 6 * _SORTING_BYTES]


def _batch_norm(call: Call) -> list[int]:
    given = next(each for each in call.args if isinstance(each, TensorSpec))
    if given.dtype == torch.float64 or given.stride[1] != 1 or math.prod(given.shape[2:]) == 1:
        return []
    tiles = -(-given.shape[1] // _CHANNELS_OF_A_TILE) * (given.numel // given.shape[1])
    return [int(_BATCH_NORMS[str(call.target)] * tiles) + 32 * _SORTING_BYTES]


_SIZES: Mapping[object, Callable[[Call, Machine], list[int]]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward_and_copies,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.index_put.default: _index_put,
    _aten._unsafe_index_put.default: _index_put,
}


def workspace_bytes(call: Call, machine: Machine) -> int:
    """Bytes of ``call``'s workspace on ``machine``: 0 where it takes none and where it is not counted."""
    if str(call.target) in _BATCH_NORMS:
        sizes = _batch_norm(call)
    else:
        sizes = _SIZES[call.target](call, machine) if call.target in _SIZES else []
    return sum(machine.round_up(size) for size in sizes)


def has_product(program: Program) -> bool:
    """Whether an op of the program is one that cuBLAS computes."""
    targets = {op.target for op in program.ops}
    return any(target.startswith("aten.") and target.split(".")[1] in _PRODUCTS for target in targets)


def cublas_bytes(program: Program, machine: Machine) -> int:
    """Bytes that cuBLAS holds from the step's first product on (definition 6); 0 without a product."""
    if not has_product(program):
        return 0
    return _STEP_THREADS * machine.round_up(_by_default(machine.compute_capability[0]))


def cublas_bytes_here() -> int:
    """Bytes of the workspaces of cuBLAS and cublasLt on the current CUDA device.

    By this process's environment, and 1 MiB for cublasLt (torch 2.11).

    ``CUBLAS_WORKSPACE_CONFIG`` is pairs of KiB and how many, ``:4096:8``.
    """
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    given = sum(1024 * int(size) * int(count) for size, count in pairs)
    return _STEP_THREADS * ((given or _by_default(torch.cuda.get_device_capability()[0])) + _CUBLAS_LT_BYTES)


def _by_default(major: int) -> int:
    return 32 * 2**20 if major in (9, 10, 12) else (2 * 4096 + 8 * 16) * 1024

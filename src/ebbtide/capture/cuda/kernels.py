"""A step for a CUDA machine that is not at hand, traced on CPU tensors as it would be on CUDA.

PyTorch decides what some calls become, and what shape and dtype their results have, by the device of their arguments.
Fake CUDA tensors need a build with CUDA, so the step is traced on fake CPU tensors, and while it is, these decisions
are made as on CUDA:
1. *Composite* ops that call other ops there: attention (``cuda.attention``), softmax and log-softmax that widen
   float16 (aten/src/ATen/native/SoftMax.cpp), RMS norm (layer_norm.cpp), LSTM and GRU cells (RNN.cpp), batch norm
   (``cuda.batch_norm``). Autograd then writes the backward of what was called, as on CUDA.
2. *Results* that differ: the statistics of layer and batch norm are float32 where the input has 16 bits, and batch norm
   returns them in evaluation too; log-sigmoid keeps nothing.
3. Descriptions that ask for the device by ``device_hint`` are told CUDA (embedding bags, padding, transforms, linear
   algebra, convolution's memory format).

Ops that a build without CUDA cannot trace by their own name are traced as stand-ins and renamed in the joint graph.
Everything else is one call with the same results on both devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx

from ebbtide.capture.cuda.attention import Attention, attention_as_on_cuda
from ebbtide.capture.cuda.batch_norm import cudnn_batch_norms
from ebbtide.errors import CaptureError
from ebbtide.torch_seams.dispatcher import (
    OpOverload,
    composite,
    device_hint_is,
    enters_autocast,
    get_computation_dtype,
    suggest_memory_format,
    traced_as,
)
from ebbtide.torch_seams.fake_tensors import Dispatch, FakeTensor, FakeTensorMode, described_by, fake_device

__all__ = ["cuda_kernels", "refuse_autocast", "rename_stand_ins"]

_aten = torch.ops.aten
_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


@contextmanager
def cuda_kernels(capability: tuple[int, int]) -> Iterator[None]:
    """While open, steps are traced as on a CUDA device of this compute capability.

    Args:
        capability: major and minor number.
    """

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = Attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return attention_as_on_cuda(call, capability)[0]

    composites: dict[OpOverload, Callable[..., Any]] = {
        _aten.scaled_dot_product_attention.default: attention,
        _aten.softmax.int: _softmax(_aten._softmax.default),
        _aten.log_softmax.int: _softmax(_aten._log_softmax.default),
        _aten.rms_norm.default: _rms_norm,
        _aten.lstm_cell.default: _lstm_cell,
        _aten.gru_cell.default: _gru_cell,
    }
    with ExitStack() as stack:
        for op, kernel in composites.items():
            stack.enter_context(traced_as(op, lambda _, kernel=kernel: kernel))
        stack.enter_context(cudnn_batch_norms(elsewhere=True))
        stack.enter_context(device_hint_is("cuda"))  # definition 3
        stack.enter_context(described_by(_results_of_cuda, name=("cuda", capability)))
        yield


# -- 1: composites -------------------------------------------------------------------------------------------------


def _softmax(op: OpOverload) -> Callable[..., torch.Tensor]:
    def softmax(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if self.dtype == torch.float16 and dtype == torch.float32:
            return op(self, dim, True)
        return op(self if dtype is None else self.to(dtype), dim, False)

    return softmax


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    same_dtype = weight is None or weight.dtype == input.dtype
    if suggest_memory_format(input) in _CHANNELS_LAST or not input.is_floating_point() or not same_dtype:
        return composite(_aten.rms_norm.default, input, normalized_shape, weight, eps)
    return fused_rms_norm(input, list(normalized_shape), weight, eps)[0]


def _lstm_cell(
    input: torch.Tensor,
    hx: Sequence[torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from_input, from_hidden = torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    hidden, cell, _ = _aten._thnn_fused_lstm_cell.default(from_input, from_hidden, hx[1], b_ih, b_hh)
    return hidden, cell


def _gru_cell(
    input: torch.Tensor,
    hx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor:
    from_input, from_hidden = torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t())
    return fused_gru_cell(from_input, from_hidden, hx, b_ih, b_hh)[0]


# -- stand-ins: same arguments and results as the op that each is renamed to ---------------------------------------


def _never_run(*_: Any) -> Any:
    raise AssertionError("a stand-in for a CUDA op was run; it is there to be traced")


fused_rms_norm = torch.library.custom_op(
    "ebbtide_cuda::fused_rms_norm",
    _never_run,
    mutates_args=(),
    schema="(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)",
)
fused_gru_cell = torch.library.custom_op(
    "ebbtide_cuda::fused_gru_cell",
    _never_run,
    mutates_args=(),
    schema="(Tensor input_gates, Tensor hidden_gates, Tensor hx, Tensor? input_bias, Tensor? hidden_bias)"
    " -> (Tensor, Tensor)",
)
fused_gru_cell_backward = torch.library.custom_op(
    "ebbtide_cuda::fused_gru_cell_backward",
    _never_run,
    mutates_args=(),
    schema="(Tensor grad_hy, Tensor workspace, bool has_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@fused_rms_norm.register_fake
def _(input: torch.Tensor, normalized_shape: list[int], weight: Any, eps: Any) -> tuple[torch.Tensor, torch.Tensor]:
    kept = input.dim() - len(normalized_shape)
    statistics = [*input.shape[:kept], *([1] * len(normalized_shape))]
    rstd = input.new_empty(statistics, dtype=get_computation_dtype(input.dtype))
    return input.new_empty(input.shape), rstd


def _keep_for_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    input, ctx.shape, weight, _ = inputs
    ctx.save_for_backward(input, weight, output[1])


def _rms_norm_backward(ctx: Any, grad: torch.Tensor, _: object) -> tuple[Any, ...]:
    input, weight, rstd = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
    of_input, of_weight = _aten._fused_rms_norm_backward.default(grad, input, ctx.shape, rstd, weight, wanted)
    return of_input, None, of_weight, None


fused_rms_norm.register_autograd(_rms_norm_backward, setup_context=_keep_for_rms_norm)


@fused_gru_cell.register_fake
def _(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, input_bias: Any, hidden_bias: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    # RNN.cu, GRU_WORKSPACE_MULTIPLIER: five numbers per hidden one.
    return hx.new_empty(hx.shape), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


@fused_gru_cell_backward.register_fake
def _(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[torch.Tensor, ...]:
    batch, width = grad_hy.shape
    gates, bias = (batch, 3 * width), (3 * width if has_bias else 0,)
    shapes = (gates, gates, (batch, width), bias, bias)
    return tuple(workspace.new_empty(shape) for shape in shapes)


def _keep_for_gru(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.has_bias = inputs[3] is not None
    ctx.save_for_backward(output[1])


def _gru_backward(ctx: Any, grad: torch.Tensor, _: object) -> tuple[Any, ...]:
    (workspace,) = ctx.saved_tensors
    gates, hidden_gates, hidden, bias, hidden_bias = fused_gru_cell_backward(grad, workspace, ctx.has_bias)
    return gates, hidden_gates, hidden, *((bias, hidden_bias) if ctx.has_bias else (None, None))


fused_gru_cell.register_autograd(_gru_backward, setup_context=_keep_for_gru)

_NAMES: dict[OpOverload, OpOverload] = {
    torch.ops.ebbtide_cuda.fused_rms_norm.default: _aten._fused_rms_norm.default,
    torch.ops.ebbtide_cuda.fused_gru_cell.default: _aten._thnn_fused_gru_cell.default,
    torch.ops.ebbtide_cuda.fused_gru_cell_backward.default: _aten._thnn_fused_gru_cell_backward.default,
}


def rename_stand_ins(graph: fx.Graph) -> None:
    """Let every stand-in of ``graph`` be called by the name of the CUDA op that it stands for."""
    for stand_in, op in _NAMES.items():
        for node in graph.find_nodes(op="call_function", target=stand_in):
            node.target = op


def refuse_autocast(graph: fx.GraphModule) -> None:
    """Refuse Dynamo's ``graph`` if it turns on CUDA's autocast, which leaves tensors alone that are not on CUDA.

    Raises:
        CaptureError: with what would work.
    """
    for node in graph.graph.nodes:
        if enters_autocast(node) == "cuda":
            raise CaptureError(
                "the step turns on torch.autocast('cuda'), which does nothing to the CPU tensors that a step for a "
                "machine elsewhere is captured with: its bytes would be those of the full width. For an estimate, "
                "leave autocast out and give the model the narrow dtype (model.to(torch.bfloat16)); for the true step, "
                "plan on a machine with a CUDA device"
            )


# -- 2: results ----------------------------------------------------------------------------------------------------


def _statistics(func: OpOverload, args: Sequence[Any], results: list[FakeTensor]) -> list[tuple[Sequence[int], Any]]:
    """Shape and dtype of each result of a norm: its statistics are as wide as what it computes in."""
    wide = get_computation_dtype(args[0].dtype)
    is_batch_norm = "batch_norm" in func.name()
    shapes = [[args[0].shape[1]] if is_batch_norm else each.shape for each in results[1:3]]
    return [
        (results[0].shape, results[0].dtype),
        *((shape, wide) for shape in shapes),
        *((each.shape, each.dtype) for each in results[3:]),
    ]


def _nothing_kept(func: OpOverload, args: Sequence[Any], results: list[FakeTensor]) -> list[tuple[Sequence[int], Any]]:
    return [(results[0].shape, results[0].dtype), ((0,), results[1].dtype)]


_RESULTS: dict[OpOverload, Callable[..., list[tuple[Sequence[int], Any]]]] = {
    _aten.native_layer_norm.default: _statistics,
    _aten.native_batch_norm.default: _statistics,
    _aten._native_batch_norm_legit.default: _statistics,
    _aten._native_batch_norm_legit.no_stats: _statistics,
    _aten._native_batch_norm_legit_functional.default: _statistics,
    _aten._native_batch_norm_legit_no_training.default: _statistics,
    _aten.log_sigmoid_forward.default: _nothing_kept,
}


def _results_of_cuda(described: Dispatch) -> Dispatch:
    """Descriptions whose results have the shapes and dtypes that CUDA's kernels give (definition 2)."""

    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = described(mode, func, types, args, kwargs)
        if func not in _RESULTS or result is NotImplemented:
            return result
        results: list[Any] = list(result)
        for position, (shape, dtype) in enumerate(_RESULTS[func](func, args, results)):
            given = results[position]
            if tuple(given.shape) != tuple(shape) or given.dtype != dtype:
                with mode:
                    results[position] = torch.empty(tuple(shape), dtype=dtype, device=fake_device(given))
        return tuple(results)

    return dispatch

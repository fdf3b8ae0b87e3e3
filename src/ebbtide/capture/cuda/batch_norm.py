"""Batch norm as cuDNN computes it, which is what eager calls on CUDA for most models.

``F.batch_norm`` is composite: on CUDA it becomes ``aten.cudnn_batch_norm`` or PyTorch's own kernel, whose bits differ
(``_select_batch_norm_backend``, aten/src/ATen/native/Normalization.cpp, torch 2.11 to 2.13). A trace would write the
former as the latter. cuDNN's op changes running statistics without its schema saying so, so that here it is three ops
that change nothing, and the running statistics are copied back as other changed inputs are (docs/adr/0003):

1. ``batch_norm``, in training: result, the batch's mean and inverse deviation, what cuDNN keeps for its backward
   (the *reserve*), the new running mean and variance. The last two are empty where there are none.
2. ``batch_norm_again``: the first four alone, by the same kernel; it reads no running statistics, so that it may run
   after they were copied back.
3. ``batch_norm_inference``: result by running statistics.

Their derivatives are those of torch (tools/autograd/derivatives.yaml): cuDNN's backward, and PyTorch's own where
running statistics are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ebbtide.torch_seams.dispatcher import (
    OpOverload,
    composite,
    cudnn_reserve_bytes,
    suggest_memory_format,
    traced_as,
    traced_with_derivative,
)

__all__ = ["AGAIN", "TRAINED", "cudnn_batch_norms", "takes_cudnn"]

_aten = torch.ops.aten
_LEAST_EPSILON = 0.0  # CUDNN_BN_MIN_EPSILON of cuDNN 9
_MOST_SAMPLES = {True: 880_801, False: 65_535}
"""What cuDNN takes in training and in evaluation."""

_library = torch.library.Library("ebbtide_cuda", "FRAGMENT")
_library.define(
    "batch_norm(Tensor input, Tensor weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, float momentum,"
    " float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "batch_norm_again(Tensor input, Tensor weight, Tensor? bias, float momentum, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "batch_norm_inference(Tensor input, Tensor weight, Tensor? bias, Tensor running_mean, Tensor running_var,"
    " float eps) -> Tensor"
)
_library.define(
    "batch_norm_backward(Tensor grad, Tensor input, Tensor weight, Tensor mean, Tensor invstd, Tensor reserve,"
    " float eps) -> (Tensor, Tensor, Tensor)"
)
TRAINED: OpOverload = torch.ops.ebbtide_cuda.batch_norm.default
AGAIN: OpOverload = torch.ops.ebbtide_cuda.batch_norm_again.default
_INFERENCE = torch.ops.ebbtide_cuda.batch_norm_inference.default
_BACKWARD = torch.ops.ebbtide_cuda.batch_norm_backward.default

# -- kernels ---------------------------------------------------------------------------------------------------------


def _again(input: Any, weight: Any, bias: Any, momentum: float, eps: float) -> tuple[Any, ...]:
    return _aten.cudnn_batch_norm.default(input, weight, bias, None, None, True, momentum, eps)


def _trained(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    if running_mean is None:
        empty = [weight.new_empty(0) for _ in range(2)]
        return (*_again(input, weight, bias, momentum, eps), *empty)
    new = running_mean.clone(), running_var.clone()
    return (*_aten.cudnn_batch_norm.default(input, weight, bias, *new, True, momentum, eps), *new)


def _inference(input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, eps: float) -> Any:
    return _aten.cudnn_batch_norm.default(input, weight, bias, running_mean, running_var, False, 0.0, eps)[0]


def _backward(grad: Any, input: Any, weight: Any, mean: Any, invstd: Any, reserve: Any, eps: float) -> tuple[Any, ...]:
    return _aten.cudnn_batch_norm_backward.default(input, grad, weight, None, None, mean, invstd, eps, reserve)


for _name, _kernel in {
    "batch_norm": _trained,
    "batch_norm_again": _again,
    "batch_norm_inference": _inference,
    "batch_norm_backward": _backward,
}.items():
    _library.impl(_name, _kernel, "CUDA")

# -- descriptions ----------------------------------------------------------------------------------------------------


def _result(input: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(input, memory_format=suggest_memory_format(input))


def _fake_again(input: torch.Tensor, weight: torch.Tensor, bias: Any, momentum: float, eps: float) -> tuple[Any, ...]:
    statistics = [weight.new_empty(input.shape[1]) for _ in range(2)]
    return _result(input), *statistics, input.new_empty(cudnn_reserve_bytes(input), dtype=torch.uint8)


def _fake_trained(
    input: torch.Tensor, weight: torch.Tensor, bias: Any, running_mean: Any, running_var: Any, *rest: float
) -> tuple[Any, ...]:
    running = [weight.new_empty(0) if each is None else torch.empty_like(each) for each in (running_mean, running_var)]
    return (*_fake_again(input, weight, bias, *rest), *running)


def _fake_inference(input: torch.Tensor, *_: Any) -> torch.Tensor:
    return _result(input)


def _fake_backward(grad: Any, input: torch.Tensor, weight: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return _result(input), torch.empty_like(weight), torch.empty_like(weight)


for _op, _fake in {
    TRAINED: _fake_trained,
    AGAIN: _fake_again,
    _INFERENCE: _fake_inference,
    _BACKWARD: _fake_backward,
}.items():
    torch.library.register_fake(_op.name(), _fake, lib=_library)

# -- derivatives -----------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    input, weight, ctx.eps = inputs[0], inputs[1], inputs[6]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(input, weight, *output[1:4])


def _gradients(ctx: Any, grad: Any, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 7
    input, weight, mean, invstd, reserve = ctx.saved_tensors
    grad = grad.contiguous(memory_format=suggest_memory_format(input))
    found = _BACKWARD(grad, input, weight, mean, invstd, reserve, ctx.eps)
    return (*(g if wanted else None for g, wanted in zip(found, ctx.needs_input_grad, strict=False)), *[None] * 4)


def _keep_inference(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, weight, _, running_mean, running_var, ctx.eps = inputs
    ctx.save_for_backward(input, weight, running_mean, running_var)


def _inference_gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    input, weight, mean, var = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    kept = [weight.new_empty(0) for _ in range(2)]  # of the batch, which nobody reads; one kernel wants some
    found = _aten.native_batch_norm_backward.default(grad, input, weight, mean, var, *kept, False, ctx.eps, wanted)
    return (*(g if want else None for g, want in zip(found, wanted, strict=True)), None, None, None)


torch.library.register_autograd(TRAINED.name(), _gradients, setup_context=_keep, lib=_library)
torch.library.register_autograd(_INFERENCE.name(), _inference_gradients, setup_context=_keep_inference, lib=_library)

# -- what is traced --------------------------------------------------------------------------------------------------


def _cudnn_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> tuple[Any, ...]:
    """``aten.cudnn_batch_norm`` by the ops of this module."""
    if not training:
        empty = [weight.new_empty(0) for _ in range(2)]
        result = _INFERENCE(input, weight, bias, running_mean, running_var, epsilon)
        return result, *empty, input.new_empty(0, dtype=torch.uint8)
    momentum = exponential_average_factor
    *found, new_mean, new_var = TRAINED(input, weight, bias, running_mean, running_var, momentum, epsilon)
    if running_mean is not None:
        running_mean.copy_(new_mean)
        running_var.copy_(new_var)
    return tuple(found)


def takes_cudnn(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, *, training: bool, eps: float
) -> bool:
    """Whether CUDA's choice gives a batch norm with these arguments to cuDNN, if that is enabled."""
    halves = torch.bfloat16 in (input.dtype, None if weight is None else weight.dtype)
    if weight is None or bias is None or halves:
        return False
    if input.dtype == torch.float16 and weight.dtype != torch.float32:
        return False
    both, neither = None not in (running_mean, running_var), running_mean is None and running_var is None
    fits = input.dim() >= 3 and input.shape[0] <= _MOST_SAMPLES[training] and eps >= _LEAST_EPSILON
    return fits and (both or (neither and training))


@contextmanager
def cudnn_batch_norms(*, elsewhere: bool) -> Iterator[None]:
    """While open, a batch norm that eager gives to cuDNN is traced as one.

    Args:
        elsewhere: whether CPU tensors are traced as on CUDA; else the tensors say what is chosen.
    """

    def make(otherwise: Callable[..., Any]) -> Callable[..., Any]:
        def batch_norm(
            input: Any,
            weight: Any,
            bias: Any,
            running_mean: Any,
            running_var: Any,
            training: bool,
            momentum: float,
            eps: float,
            cudnn_enabled: bool,
        ) -> Any:
            given = (input, weight, bias, running_mean, running_var)
            if not (cudnn_enabled and takes_cudnn(*given, training=training, eps=eps)):
                return composite(_aten.batch_norm.default, *given, training, momentum, eps, cudnn_enabled)
            dense = input.contiguous(memory_format=suggest_memory_format(input))
            return _cudnn_batch_norm(dense, *given[1:], training, momentum, eps)[0]

        return batch_norm

    with (
        traced_with_derivative(_aten.cudnn_batch_norm.default, _cudnn_batch_norm),
        traced_as(_aten.batch_norm.default, make) if elsewhere else nullcontext(),
    ):
        yield

"""CTC loss with the sizes that a plan needs: its table of partial sums is as large as the longest target may be.

``aten._ctc_loss`` returns a table whose width is twice the longest target's length and one: a size that depends on
data. Here the same kernels run behind two ops whose table, and whose workspace, is as large as any target may need: as
the longest of lengths that are Python numbers, as targets in rows have columns, or as all of targets in one line. The
bits are eager's: the kernel gets a table of its own width, and what is beyond it is never read. What the C++ code does
around the kernels (``aten/src/ATen/native/LossCTC.cpp``, ``ctc_loss_impl``) is :func:`ctc_loss`. On CUDA, eager may
take cuDNN's kernel instead, and the loss is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ebbtide.torch_seams.tracing import traced_by_dynamo_as

__all__ = ["ctc_with_sizes"]

_aten = torch.ops.aten
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


@contextmanager
def ctc_with_sizes() -> Iterator[None]:
    """While open, the CTC losses of CPU tensors that this thread traces are :func:`ctc_loss`."""
    with (
        traced_by_dynamo_as(torch.nn.functional.ctc_loss, _functional, when=_is_ours),
        traced_by_dynamo_as(torch.ctc_loss, ctc_loss, when=_is_ours),
    ):
        yield


def _is_ours(log_probs: Any = None, *_args: Any, **_kwargs: Any) -> bool:
    return isinstance(log_probs, torch.Tensor) and log_probs.device.type == "cpu"


def _functional(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, _REDUCTIONS[reduction], zero_infinity)


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """What ``torch.ctc_loss`` computes on a CPU."""
    batched = log_probs.dim() == 3
    if not batched:
        log_probs = log_probs.unsqueeze(1)
    if isinstance(target_lengths, torch.Tensor):
        longest = targets.shape[-1]
        lengths = target_lengths.reshape(-1)
    else:
        longest = max(target_lengths)
        lengths = torch.tensor(target_lengths)
    inputs = input_lengths.reshape(-1) if isinstance(input_lengths, torch.Tensor) else torch.tensor(input_lengths)
    losses, _ = torch.ops.ebbtide_kernels.ctc_loss(
        log_probs, targets.long(), inputs.long(), lengths.long(), blank, zero_infinity, longest
    )
    if zero_infinity:
        losses = torch.where(losses == math.inf, torch.zeros((), dtype=losses.dtype), losses)
    if reduction == 1:
        return (losses / lengths.to(losses.dtype).clamp_min(1)).mean()
    if reduction == 2:
        return losses.sum()
    return losses if batched else losses.squeeze(0)


def _width(lengths: list[int]) -> int:
    return 2 * max(lengths, default=0) + 1


def _rest(table: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Memory for what a table of the kernel's width is smaller than ``table``: no byte is to depend on data."""
    batch, steps, width = table.shape
    return table.new_empty(batch * steps * (width - _width(lengths)))


@torch.library.custom_op("ebbtide_kernels::ctc_loss", mutates_args=())
def _loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of a batch, and the table that their gradient needs."""
    inputs, lengths = input_lengths.tolist(), target_lengths.tolist()
    steps, batch, _ = log_probs.shape
    wide = log_probs.new_zeros((batch, steps, 2 * longest + 1))
    rest = _rest(wide, lengths)
    losses, table = _aten._ctc_loss.default(log_probs, targets, inputs, lengths, blank, zero_infinity)
    wide[:, :, : table.shape[2]] = table
    del rest
    return losses, wide


@_loss.register_fake
def _(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty((batch, steps, 2 * longest + 1))


@torch.library.custom_op("ebbtide_kernels::ctc_loss_backward", mutates_args=())
def _gradient(
    gradient: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    losses: torch.Tensor,
    table: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The gradient of ``log_probs``."""
    inputs, lengths = input_lengths.tolist(), target_lengths.tolist()
    rest = _rest(table, lengths), _rest(table, lengths)  # the kernel makes another table of the width that it is given
    narrow = table[:, :, : _width(lengths)].clone(memory_format=torch.contiguous_format)
    found = _aten._ctc_loss_backward.default(
        gradient, log_probs, targets, inputs, lengths, losses, narrow, blank, zero_infinity
    )
    del rest
    return found


@_gradient.register_fake
def _(
    gradient: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    losses: torch.Tensor,
    table: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    log_probs, targets, input_lengths, target_lengths, blank, zero_infinity, _ = inputs
    ctx.save_for_backward(log_probs, targets, input_lengths, target_lengths, *output)
    ctx.rest = (blank, zero_infinity)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> Any:
    return torch.ops.ebbtide_kernels.ctc_loss_backward(gradient, *ctx.saved_tensors, *ctx.rest), *[None] * 6


_loss.register_autograd(_backward, setup_context=_save)

"""TRL's fused head as two ops: log-probabilities of tokens, from hidden states, without the logits.

TRL's trainers (from 1.16 on) put a forward on the model that ends in an ``autograd.Function`` of theirs, which goes
through the vocabulary in tiles and writes into them. Taken apart, that is no graph. So where a step is captured while
such a trainer trains under a budget, the function is an op, whole:
1. The *forward op* calls the function's own ``forward``, and gives beside its results the normalizers that it saves.
   The *backward op* calls its own ``backward``. The bits and the memory are therefore TRL's.
2. A graph is handed zeros for the gradient of an output that nobody used, where eager is handed nothing: zeros for the
   entropy's are nothing here, and its term is left out as in eager.
3. The function reads autocast from its surroundings, of which an op has none: the type is an argument.
4. On a card the trainer's forward selects the tokens that have labels, whose number depends on data, before it calls
   the function. That is no graph either, and capture refuses it with its line.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from ebbtide.errors import UsageError
from ebbtide.torch_seams.compile_mode import capturing, constant_in_traces
from ebbtide.torch_seams.patches import Attribute, Patch, patched

__all__ = ["opaque_head"]

_FUNCTION = "_ChunkedLogProbFunction"
_OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def opaque_head() -> Patch | None:
    """Open: captures of steps take TRL's function as an op. ``None`` if this release of TRL has none."""
    try:
        from trl.trainer import utils
    except ImportError:
        return None
    if not hasattr(utils, _FUNCTION):
        return None
    found = vars(utils)[_FUNCTION]
    # Where a training did not come to its end, what stands in is still there.
    return patched(Attribute(utils, _FUNCTION), _whole(getattr(found, "stands_for", found))).open()


class _Context:
    """What an ``autograd.Function`` is given as ``ctx``."""

    needs_input_grad: tuple[bool, ...] = ()
    saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, _: bool) -> None:
        pass

    def mark_non_differentiable(self, *_: Tensor) -> None:
        pass


@constant_in_traces
def _captured() -> bool:
    return capturing()


@functools.cache
def _whole(function: Any) -> type:
    """What stands in for ``function``: an op in captured steps, itself elsewhere."""
    forward_op = _ops_of(function)

    class Whole:
        stands_for = function

        @staticmethod
        def apply(
            hidden: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            targets: Tensor,
            temperature: float,
            chunk_size: int,
            softcapping: float | None = None,
            logit_scale: float = 1.0,
            outputs: tuple[str, ...] = _OPTIONAL,
        ) -> Any:
            if not _captured():
                return function.apply(
                    hidden, weight, bias, targets, temperature, chunk_size, softcapping, logit_scale, outputs
                )
            kind = hidden.device.type
            cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None  # definition 3
            found = forward_op(
                hidden,
                weight,
                bias,
                targets,
                temperature,
                chunk_size,
                softcapping,
                logit_scale,
                ",".join(outputs),
                cast,
            )
            rest = (value if name in outputs else None for name, value in zip(_OPTIONAL, found[1:5], strict=True))
            return (found[0], *rest)

    return Whole


@functools.cache
def _ops_of(function: Any) -> Any:
    """The forward op, whose derivative is the backward op (definition 1)."""

    @torch.library.custom_op("ebbtide_trl::log_probs", mutates_args=())
    def log_probs(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcapping: float | None,
        logit_scale: float,
        outputs: str,
        cast: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        names = _names(outputs)
        statics = (temperature, chunk_size, softcapping, logit_scale, names)
        context, found = _forward(function, cast, hidden, weight, bias, targets, *statics)
        nothing = (hidden.new_empty(0) for _ in _OPTIONAL)
        rest = (none if value is None else value for value, none in zip(found[1:], nothing, strict=True))
        return (found[0], *rest, _normalizers(context))  # pyright: ignore[reportReturnType]

    @torch.library.custom_op("ebbtide_trl::log_probs_backward", mutates_args=())
    def log_probs_backward(
        of_log_probs: Tensor | None,
        of_entropy: Tensor | None,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        normalizers: Tensor,
        entropy: Tensor,
        temperature: float,
        chunk_size: int,
        softcapping: float | None,
        logit_scale: float,
        outputs: str,
        cast: torch.dtype | None,
        needed: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        names = _names(outputs)
        statics = (temperature, chunk_size, softcapping, logit_scale, names)
        # Of no tokens: what the function keeps of its settings, by names of its own.
        context, _ = _forward(function, cast, hidden[:0], weight, bias, targets[:0], *statics)
        known = normalizers if "entropy" not in names else entropy
        context.saved_tensors = (hidden, weight, bias, targets, normalizers, known)
        context.needs_input_grad = tuple(each == "1" for each in needed)
        if of_entropy is not None and ("entropy" not in names or not bool(of_entropy.any())):
            of_entropy = None  # definition 2
        found = function.backward(context, of_log_probs, of_entropy, None, None, None)[:3]
        return tuple(hidden.new_empty(0) if each is None else each for each in found)  # pyright: ignore[reportReturnType]

    _describe(log_probs, log_probs_backward)
    return log_probs


def _describe(log_probs: Any, log_probs_backward: Any) -> None:
    """Shapes of results, and whose derivative the backward op is."""

    @log_probs.register_fake
    def _(hidden: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        outputs = rest[-2]
        row = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        types = (torch.float32, torch.float32, torch.float32, torch.bool)
        asked = [
            row.new_empty(row.shape, dtype=kind) if name in _names(outputs) else hidden.new_empty(0)
            for name, kind in zip(_OPTIONAL, types, strict=True)
        ]
        return (row, *asked, torch.empty_like(row))

    @log_probs_backward.register_fake
    def _(a: Any, b: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any):
        like = (hidden, weight, bias)
        return tuple(
            hidden.new_empty(0) if each is None or flag != "1" else torch.empty_like(each, memory_format=_DENSE)
            for each, flag in zip(like, rest[-1], strict=True)
        )

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        hidden, weight, bias, targets, *ctx.statics = inputs
        ctx.save_for_backward(hidden, weight, bias, targets, output[5], output[1])
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    def derive(ctx: Any, of_log_probs: Any, of_entropy: Any, *_: Any) -> Any:
        needed = "".join("1" if each else "0" for each in ctx.needs_input_grad[:3])
        found = log_probs_backward(of_log_probs, of_entropy, *ctx.saved_tensors, *ctx.statics, needed)
        asked = (value if flag == "1" else None for value, flag in zip(found, needed, strict=True))
        return (*asked, *(None for _ in range(7)))

    log_probs.register_autograd(derive, setup_context=keep)


_DENSE = torch.contiguous_format


def _names(outputs: str) -> tuple[str, ...]:
    return tuple(filter(None, outputs.split(",")))


def _forward(function: Any, cast: torch.dtype | None, hidden: Tensor, *rest: Any) -> tuple[_Context, tuple[Any, ...]]:
    context = _Context()
    with contextlib.ExitStack() as stack:
        if cast is not None:
            stack.enter_context(torch.autocast(hidden.device.type, cast, cache_enabled=False))
        found = function.forward(context, hidden, *rest)
    return context, found


def _normalizers(context: _Context) -> Tensor:
    """What the function saves beside its arguments and results.

    Raises:
        UsageError: if it saves something else than the one of TRL 1.16.
    """
    saved = context.saved_tensors
    if len(saved) == 6 and saved[4] is not None and saved[4].dim() == 1:
        return saved[4]
    raise UsageError(
        "this release of TRL keeps other tensors in its fused head than 1.16 does, so Ebbtide cannot take it as an op; "
        "install trl 1.16, or leave MemoryBudget out of the trainer's callbacks",
        argument="callbacks",
    )

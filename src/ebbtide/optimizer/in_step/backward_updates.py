"""The updates of one backward: by what gradient each parameter is stepped, and what is said if that fails.

1. Options of the optimizer are what they are when the backward begins.
2. Where gradients are clipped by their norm, the norm of each is taken when it is made, that of all once all are there,
   and updates come after that. Gradients that are there already are added to first, and those of parameters that the
   step does not reach are in the norm and are scaled in place, as ``clip_grad_norm_`` does.
3. With a gradient scaler each is searched for elements that are not finite, likewise. If one has some, nothing is
   updated, and the scaler is told so when it asks (``applied``); else each is multiplied by what the scale was when the
   backward began, inverted, before it is clipped and applied.
4. A backward that fails after its first update raises :class:`~ebbtide.errors.UpdateError`, which names what has been
   updated: those steps are made, the others are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ebbtide.errors import CaptureError, UpdateError, UsageError
from ebbtide.optimizer.in_step.optimizer_in_backward import OptimizerInBackward
from ebbtide.optimizer.in_step.single_parameter import step_parameter
from ebbtide.optimizer.in_step.updates import names_of
from ebbtide.torch_seams.gradient_norms import coefficient_of, norm_of, scale_by, total_of
from ebbtide.torch_seams.optimizers import gradient_of, set_gradient, will_accumulate
from ebbtide.torch_seams.scalers import inverse_scale_of, multiply_and_check

__all__ = ["BackwardUpdates"]


class BackwardUpdates:
    """The updates of one pending step; the :class:`~ebbtide.optimizer.in_step.updater.Updater` of its backward.

    Args:
        optimizer: of its model.
        parameters: by position among the primals, with their names.
        entries: per position, its place among the tensors that go into the step's node.
    """

    def __init__(
        self,
        optimizer: OptimizerInBackward,
        parameters: Mapping[int, tuple[torch.Tensor, str]],
        entries: Mapping[int, int],
    ) -> None:
        self._in_backward = optimizer
        self._trained = dict(parameters)
        self._entries = entries
        self._groups: dict[int, dict[str, Any]] = {}
        self._left_out: set[int] = set()
        self._updated: list[tuple[torch.Tensor, str]] = []
        self._coefficient: torch.Tensor | None = None
        self._skipped: list[tuple[torch.Tensor, str]] = []
        self._overflow: torch.Tensor | None = None
        self._inverse: torch.Tensor | None = None
        self._skips = False

    def begin(self, node: Any, unused: frozenset[int]) -> None:
        """Its backward begins.

        Args:
            node: of the step.
            unused: positions whose gradients are none, for nothing that was used depends on them.
        """
        groups = self._in_backward.optimizer.param_groups
        self._groups = {id(each): group for group in groups for each in group["params"]}
        self._in_backward.begin()
        self._updated = []
        self._coefficient = None
        self._begin_scaled()
        self._left_out = set(unused)
        for position, (parameter, name) in self._trained.items():
            if id(parameter) not in self._groups or not parameter.requires_grad:
                raise UsageError(
                    f"{name} was trained by the optimizer when its step was planned, and is not any more; tell of "
                    "another optimizer (ebbtide.set_optimizer), and freeze parameters before the forward"
                )
            if position in self._left_out:
                continue
            wanted = will_accumulate(node, self._entries[position])
            if wanted is None:
                raise CaptureError(
                    'torch.autograd.grad was called on what a fitted model has computed, and step="inside" applies '
                    "gradients in a backward and hands none out. Nothing has been updated",
                    remedy='call loss.backward(), or leave step="inside" out',
                )
            if not wanted:
                self._left_out.add(position)

    def _begin_scaled(self) -> None:
        """Begin to look for gradients that are not finite (definition 3)."""
        self._skipped, self._skips, self._inverse = [], False, None
        if (scaler := self._in_backward.scaler) is not None:
            self._inverse = inverse_scale_of(scaler)
            if self._inverse is None:
                raise UsageError(
                    "the model was fitted with a scaler, which has not scaled this loss: scaler.scale(loss).backward()"
                )
            self._overflow = torch.zeros_like(self._inverse)

    def _partial_norm(self, gradient: torch.Tensor) -> torch.Tensor:
        """One number that is known of ``gradient``, which stays as it is: its norm, once it is unscaled."""
        clipping = self._in_backward.clipping
        if self._inverse is not None and self._overflow is not None:
            if gradient.dtype == torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")  # as the scaler says it
            if clipping is None:
                multiply_and_check(gradient, self._overflow, torch.ones_like(self._inverse))
                return gradient.new_zeros(())
            gradient = gradient.clone()
            multiply_and_check(gradient, self._overflow, self._inverse)
        assert clipping is not None
        return norm_of(gradient, clipping.norm_type, clipping.foreach)

    def partial_norm(self, position: int, gradient: torch.Tensor) -> torch.Tensor:
        """What is known of the gradient that the parameter at ``position`` has with this one (definitions 2 and 3)."""
        if position in self._left_out:
            return gradient.new_zeros(())
        with torch.no_grad():
            if (existing := gradient_of(self._trained[position][0])) is not None:
                existing += gradient
                gradient = existing
            return self._partial_norm(gradient)

    def total_norm(self, norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What gradients are scaled by, of all that parameters have (definitions 2 and 3)."""
        clipping = self._in_backward.clipping
        made_norms = {id(self._trained[i][0]): norm for i, norm in norms.items() if i not in self._left_out}
        parts: list[torch.Tensor] = []
        of: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        with torch.no_grad():
            for parameter in self._in_backward.parameters():
                if (norm := made_norms.get(id(parameter))) is not None:
                    parts.append(norm)
                    of.append(parameter)
                elif (gradient := gradient_of(parameter)) is not None:
                    parts.append(self._partial_norm(gradient))
                    of.append(gradient)
                    others.append(gradient)
            if self._overflow is not None and self._inverse is not None:
                self._skips = bool(self._overflow.item())
            if clipping is None:
                return next(iter(norms.values()))
            if others and self._inverse is not None:
                raise UsageError(
                    "a parameter has a gradient that this step does not add to, and the scaler unscales it after the "
                    "step has clipped: clear gradients before such a step, or leave max_norm out"
                )
            total = total_of(parts, of, clipping.norm_type, error_if_nonfinite=clipping.error_if_nonfinite)
            self._in_backward.total_norm = total
            self._coefficient = coefficient_of(total, clipping.max_norm)
            for gradient in others:
                scale_by(gradient, self._coefficient, clipping.foreach)
        return self._coefficient

    def update(self, position: int, gradient: torch.Tensor) -> None:
        """Step the parameter at ``position`` by ``gradient``."""
        if position in self._left_out:
            return
        parameter, name = self._trained[position]
        if self._skips:
            self._skipped.append((parameter, name))
            set_gradient(parameter, None)
            return
        clipping = self._in_backward.clipping
        if clipping is not None or self._inverse is not None:
            gradient = gradient if (existing := gradient_of(parameter)) is None else existing
            with torch.no_grad():
                if self._inverse is not None and self._overflow is not None:
                    multiply_and_check(gradient, self._overflow, self._inverse)
                if clipping is not None and self._coefficient is not None:
                    scale_by(gradient, self._coefficient, clipping.foreach)
        # In the list first: an update that is interrupted may have been made in part.
        self._updated.append((parameter, name))
        step_parameter(self._in_backward.optimizer, self._groups[id(parameter)], parameter, gradient)

    def end(self) -> None:
        """Its backward has returned, or failed."""
        self._in_backward.gradient_guard.overflowed = self._skips
        if self._skipped:
            self._in_backward.gradient_guard.add(self._skipped)
        if self._updated:
            self._in_backward.order_new_state()
            self._in_backward.has_updated = True
            self._in_backward.gradient_guard.add(self._updated)
        self._in_backward.update_audit.note_tensors()

    def failed(self, error: BaseException) -> BaseException:
        """What to raise in place of ``error`` (definition 4)."""
        if not self._updated:
            return error
        names = [name for _, name in self._updated]
        said = (
            f"the backward failed after it had updated {names_of(names)} ({len(names)} of {len(self._trained)} "
            f"parameters; .updated has all names): {type(error).__name__}: {error}. The others are as they were. Load "
            "a checkpoint, or go on: optimizer.step() and zero_grad() end this step as it is"
        )
        if not isinstance(error, Exception):
            error.add_note(said)
            return error
        return UpdateError(said, updated=names)

"""The updates of one backward: by what gradient each parameter is stepped, and what is said if that fails.

1. Options of the optimizer are what they are when the backward begins.
2. Where gradients are clipped by their norm, the norm of each is taken when it is made, that of all once all are there,
   and updates come after that. Gradients that are there already are added to first, and those of parameters that the
   step does not reach are in the norm and are scaled in place, as ``clip_grad_norm_`` does.
3. A backward that fails after its first update raises :class:`~ebbtide.errors.UpdateError`, which names what has been
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
from ebbtide.torch_seams.optimizers import gradient_of, will_accumulate

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

    def partial_norm(self, position: int, gradient: torch.Tensor) -> torch.Tensor:
        """The norm of the gradient that the parameter at ``position`` has with this one (definition 2)."""
        if position in self._left_out:
            return gradient.new_zeros(())
        with torch.no_grad():
            if (existing := gradient_of(self._trained[position][0])) is not None:
                existing += gradient
                gradient = existing
            return norm_of(gradient)

    def total_norm(self, norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What gradients are scaled by, of all that parameters have (definition 2)."""
        max_norm = self._in_backward.max_norm
        assert max_norm is not None
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
                    parts.append(norm_of(gradient))
                    of.append(gradient)
                    others.append(gradient)
            total = total_of(parts, of)
            self._in_backward.total_norm = total
            self._coefficient = coefficient_of(total, max_norm)
            for gradient in others:
                scale_by(gradient, self._coefficient)
        return self._coefficient

    def update(self, position: int, gradient: torch.Tensor) -> None:
        """Step the parameter at ``position`` by ``gradient``."""
        if position in self._left_out:
            return
        parameter, name = self._trained[position]
        if self._coefficient is not None:
            gradient = gradient if (existing := gradient_of(parameter)) is None else existing
            with torch.no_grad():
                scale_by(gradient, self._coefficient)
        # In the list first: an update that is interrupted may have been made in part.
        self._updated.append((parameter, name))
        step_parameter(self._in_backward.optimizer, self._groups[id(parameter)], parameter, gradient)

    def end(self) -> None:
        """Its backward has returned, or failed."""
        if self._updated:
            self._in_backward.order_new_state()
            self._in_backward.has_updated = True
            self._in_backward.gradient_guard.add(self._updated)
        self._in_backward.update_audit.note_tensors()

    def failed(self, error: BaseException) -> BaseException:
        """What to raise in place of ``error`` (definition 3)."""
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

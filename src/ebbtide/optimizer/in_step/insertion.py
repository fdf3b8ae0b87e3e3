"""From a captured step to the same step with an optimizer in it: which parameters it updates, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.errors import CaptureError
from ebbtide.optimizer.cost.update_costs import UpdateCosts
from ebbtide.optimizer.in_step.norm_ops import PartialNorm, with_norms
from ebbtide.optimizer.in_step.proof import prove_norms, prove_updates
from ebbtide.optimizer.in_step.updates import Update, updatable, with_updates

__all__ = ["UpdateInsertion"]


class UpdateInsertion:
    """What puts an optimizer into steps of a model.

    Args:
        optimizer: of real, fake or meta parameters.
        model: whose parameters they are.
        device: type of the one that the step is for; that of the parameters if ``None``.
        max_norm: to what norm gradients are clipped first.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        device: str | None = None,
        max_norm: float | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._trained: Mapping[str, torch.Tensor] = dict(model.named_parameters())
        self._costs = UpdateCosts(optimizer, device)

    def with_updates(self, captured: Captured) -> Captured:
        """``captured`` with its updates, proven to be it otherwise; itself where there are none.

        Raises:
            UsageError: if it cannot be found out what an update takes.
        """
        updates = self._updates(captured)
        if not updates:
            return captured
        updating = with_updates(captured, updates)
        prove_updates(captured, updating)
        return updating

    def with_norms(self, captured: Captured) -> Captured:
        """``captured`` with norms of all gradients, where they are clipped; before any rewrite of it.

        Raises:
            CaptureError: if a parameter gets a gradient that the step does not apply, so that there is no norm of all.
        """
        if self._max_norm is None:
            return captured
        updates = self._updates(captured)
        self._refuse_what_is_left(captured, {each.position for each in updates})
        if not updates:
            return captured
        norms = {
            PartialNorm(each.position, each.parameter): self._costs.of_partial_norm(self._trained[each.parameter])
            for each in updates
        }
        normed = with_norms(
            captured, norms, self._costs.of_total_norm([self._trained[each.parameter] for each in norms])
        )
        prove_norms(captured, normed, [each.position for each in norms])
        return normed

    def _refuse_what_is_left(self, captured: Captured, updated: set[int]) -> None:
        gradients = captured.outputs[captured.forward_output_count :]
        for position, (name, gradient) in enumerate(zip(captured.parameters, gradients, strict=True)):
            if not name or not isinstance(gradient, fx.Node) or position in updated:
                continue
            raise CaptureError(
                f"max_norm is of the gradients of all parameters, and {name} gets one that the optimizer in the "
                "step does not apply",
                remedy="give the optimizer all parameters that are trained and freeze the others "
                '(requires_grad_(False)), or leave step="inside" out',
            )

    def _updates(self, captured: Captured) -> dict[Update, tuple[int, int]]:
        """Updates of the optimizer's parameters, with the bytes that each takes and moves."""
        groups = {id(each): i for i, group in enumerate(self._optimizer.param_groups) for each in group["params"]}
        kind = type(self._optimizer).__name__
        found: dict[Update, tuple[int, int]] = {}
        for position, name in updatable(captured).items():
            parameter = self._trained.get(name)
            if parameter is not None and id(parameter) in groups:
                found[Update(position, name, kind)] = self._costs.of(groups[id(parameter)], parameter)
        return found

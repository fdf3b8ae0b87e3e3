"""From a captured step to the same step with an optimizer in it: which parameters it updates, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ebbflow.capture.joint import Captured
from ebbflow.inside.costs import UpdateCosts
from ebbflow.inside.proof import prove_updates
from ebbflow.inside.updates import Update, updatable, with_updates

__all__ = ["WithOptimizer"]


class WithOptimizer:
    """What puts an optimizer into steps of a model.

    Args:
        optimizer: of real, fake or meta parameters.
        model: whose parameters they are.
        device: type of the one that the step is for; that of the parameters if ``None``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, device: str | None = None) -> None:
        self._optimizer = optimizer
        self._trained: Mapping[str, torch.Tensor] = dict(model.named_parameters())
        self._costs = UpdateCosts(optimizer, device)

    def __call__(self, captured: Captured) -> Captured:
        """``captured`` with its updates, proven to be it otherwise; itself where there are none.

        Raises:
            UsageError: if it cannot be found out what an update takes.
        """
        updates = self._updates(captured)
        if not updates:
            return captured
        made = with_updates(captured, updates)
        prove_updates(captured, made)
        return made

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

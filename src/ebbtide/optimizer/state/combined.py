"""Several optimizers of one model, as one whose state is to be counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["CombinedOptimizers", "class_names", "parts_of"]


class CombinedOptimizers(torch.optim.Optimizer):
    """The state of ``parts`` counted together; it takes no step of its own.

    Args:
        parts: optimizers, each of which trains some of a model's parameters.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        # Not made as an optimizer: it has no groups of its own. Whoever counts state finds the parts in this attribute.
        self.parts = tuple(parts)
        self.state: Any = {}
        self.param_groups: list[dict[str, Any]] = []

    def step(self, closure: Any = None) -> Any:
        """Refused: each part steps by itself.

        Raises:
            TypeError: always.
        """
        raise TypeError("several optimizers together take no step; each of them does")


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that it stands for: itself, or those that are together."""
    return optimizer.parts if isinstance(optimizer, CombinedOptimizers) else (optimizer,)


def class_names(optimizer: torch.optim.Optimizer) -> str:
    """Names of the classes that it stands for; of a wrapper that holds one (accelerate's), that one's."""
    inner = (getattr(each, "optimizer", each) for each in parts_of(optimizer))
    return " and ".join(type(each).__name__ for each in inner)

"""A chain of linear layers and GELUs: the plainest recompute problem there is."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.case import Case

__all__ = ["MLPChain", "mlp_chain"]


class MLPChain(nn.Module):
    """``layers`` times linear and GELU, then the mean of squares as loss."""

    def __init__(self, layers: int = 64, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scalar loss of ``x``, shape ``(batch, width)``."""
        for layer in self.layers:
            x = self.dropout(F.gelu(layer(x)))
        return x.square().mean()


def mlp_chain(batch: int = 512, *, layers: int = 64, width: int = 64, dropout: float = 0.0) -> Case:
    """A training call of :class:`MLPChain` on ``batch`` random rows."""
    model = MLPChain(layers, width, dropout)
    return Case(model, (torch.randn(batch, width),), name=f"mlp_chain-{layers}L-d{width}-b{batch}")

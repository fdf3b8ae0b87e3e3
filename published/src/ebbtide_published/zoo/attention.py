"""Attention of one query at a time to a memory: the additive and the multiplicative score.

Keys are made once from the memory and passed to every query's call, as every step of a decoder reads them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["AdditiveAttention", "MlpAttention", "MultiplicativeAttention"]


class AdditiveAttention(nn.Module):
    """Score of a query and a place: ``v . tanh(W query + U memory)`` (Bahdanau et al. 2015, appendix A.1.2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, query: torch.Tensor, keys: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Mean of ``memory`` weighted by the scores, shape ``(batch, width)``.

        Args:
            query: shape ``(batch, width)``.
            keys: ``self.key(memory)``, the same for every step.
            memory: shape ``(batch, length, width)``.
        """
        scores = self.score(torch.tanh(self.query(query).unsqueeze(1) + keys))
        return (F.softmax(scores, 1) * memory).sum(1)


class MlpAttention(nn.Module):
    """The additive score as Sockeye has it: of a size of its own, a layer norm before the tanh if wanted, one product.

    Args:
        width: of queries and memory.
        hidden: size of what the tanh is of.
        normalised: whether a layer norm is before the tanh.
    """

    def __init__(self, width: int, hidden: int, *, normalised: bool) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden) if normalised else nn.Identity()
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, query: torch.Tensor, keys: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Attend, with the arguments of :class:`AdditiveAttention`."""
        scores = self.score(torch.tanh(self.norm(self.query(query).unsqueeze(1) + keys)))
        return torch.bmm(F.softmax(scores, 1).transpose(1, 2), memory).squeeze(1)


class MultiplicativeAttention(nn.Module):
    """Score of a query and a place: ``query . W memory`` (Luong et al. 2015, equation 8, "general")."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, query: torch.Tensor, keys: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Attend, with the arguments of :class:`AdditiveAttention`."""
        weights = F.softmax(torch.bmm(keys, query.unsqueeze(2)), 1)
        return torch.bmm(weights.transpose(1, 2), memory).squeeze(1)

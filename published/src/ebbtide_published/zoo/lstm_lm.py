"""A language model of stacked LSTMs with dropout between layers and never along time (Zaremba et al. 2014)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.case import Case
from ebbtide.zoo.inputs import integers

__all__ = ["LSTMLanguageModel", "lstm_lm"]

_INITIAL = 0.05  # parameters start uniform in plus or minus this (section 4.1, medium)


class LSTMLanguageModel(nn.Module):
    """Embedding, dropout, LSTMs with dropout between them, dropout, a head; the forward returns the loss.

    Args:
        vocabulary: number of tokens.
        width: size of the embedding and of each state.
        layers: number of LSTMs.
        dropout: probability.
    """

    def __init__(self, *, vocabulary: int = 10_000, width: int = 650, layers: int = 2, dropout: float = 0.5) -> None:
        super().__init__()
        self.tokens, self.dropout = nn.Embedding(vocabulary, width), nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout)
        self.head = nn.Linear(width, vocabulary)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -_INITIAL, _INITIAL)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of ``targets`` given ``tokens``, both int64 of shape ``(length, batch)``."""
        x, _ = self.lstm(self.dropout(self.tokens(tokens)))
        return F.cross_entropy(self.head(self.dropout(x)).flatten(0, 1), targets.flatten())


def lstm_lm(
    batch: int = 20,
    *,
    vocabulary: int = 10_000,
    length: int = 35,
    width: int = 650,
    layers: int = 2,
    dropout: float = 0.5,
) -> Case:
    """A training call of :class:`LSTMLanguageModel`; the defaults are the paper's medium model on Penn Treebank.

    Args:
        batch: number of sequences.
        vocabulary: number of tokens.
        length: tokens that are unrolled.
        width: size of the embedding and of each state.
        layers: number of LSTMs.
        dropout: probability.
    """
    model = LSTMLanguageModel(vocabulary=vocabulary, width=width, layers=layers, dropout=dropout)
    tokens = integers(vocabulary, length + 1, batch)
    name = f"lstm_lm-{layers}L-d{width}-t{length}-b{batch}"
    return Case(model, (tokens[:-1].contiguous(), tokens[1:].contiguous()), name=name)

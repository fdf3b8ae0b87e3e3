"""Translation by an LSTM encoder and an LSTM decoder with attention, in its two classic forms.

``nmt`` is Bahdanau et al. 2015 with LSTMs for GRUs: the state *before* a step asks, by an additive score, and what it
gets is an input of the step. ``nmt_luong`` is Luong et al. 2015: the state *after* a step asks, by a multiplicative
score ("general"), and the answer is fed to the next step ("input feeding"). Both decoders take one target token at a
time, so the graph is as deep as the target is long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ebbflow.case import Case
from ebbflow.zoo.inputs import integers

__all__ = ["NMT", "NMTConfig", "nmt", "nmt_luong"]

_State = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class NMTConfig:
    """Sizes of an :class:`NMT`."""

    vocabulary: int = 4000
    """Number of tokens, source and target each."""
    length: int = 30
    """Tokens of the source and of the target."""
    width: int = 256
    """Size of embeddings, of the decoder's state and of the encoder's two directions together; even."""
    dropout: float = 0.2
    """Probability for embeddings and for what the head reads."""
    multiplicative: bool = False
    """Luong's form instead of Bahdanau's."""


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


class MultiplicativeAttention(nn.Module):
    """Score of a query and a place: ``query . W memory`` (Luong et al. 2015, equation 8, "general")."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, query: torch.Tensor, keys: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """As :class:`AdditiveAttention`."""
        weights = F.softmax(torch.bmm(keys, query.unsqueeze(2)), 1)
        return torch.bmm(weights.transpose(1, 2), memory).squeeze(1)


class NMT(nn.Module):
    """A bidirectional encoder, a decoder that steps over the target's tokens, a head; the forward returns the loss."""

    def __init__(self, config: NMTConfig) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.source, self.target = (nn.Embedding(config.vocabulary, width) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.cell = nn.LSTMCell(2 * width, width)
        self.attention = MultiplicativeAttention(width) if config.multiplicative else AdditiveAttention(width)
        self.readout = nn.Linear(2 * width if config.multiplicative else 3 * width, width)
        self.head = nn.Linear(width, config.vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of each target token given those before it and the source.

        Args:
            source: int64 tokens, shape ``(batch, length)``.
            target: int64 tokens, shape ``(batch, length + 1)``; the first only starts the decoder.
        """
        memory, (hidden, cell) = self.encoder(self.dropout(self.source(source)))
        state = (hidden.transpose(0, 1).flatten(1), cell.transpose(0, 1).flatten(1))
        inputs = self.dropout(self.target(target[:, :-1])).unbind(1)
        decode = self._luong if self.config.multiplicative else self._bahdanau
        read = decode(inputs, state, self.attention.key(memory), memory)
        return F.cross_entropy(self.head(read).flatten(0, 1), target[:, 1:].flatten())

    def _bahdanau(
        self, inputs: tuple[torch.Tensor, ...], state: _State, keys: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        """What the head reads of each step, shape ``(batch, length, width)``; tanh stands for the paper's maxout."""
        reads: list[torch.Tensor] = []
        for token in inputs:
            context = self.attention(state[0], keys, memory)
            state = self.cell(torch.cat([token, context], 1), state)
            reads.append(self.dropout(torch.tanh(self.readout(torch.cat([state[0], context, token], 1)))))
        return torch.stack(reads, 1)

    def _luong(
        self, inputs: tuple[torch.Tensor, ...], state: _State, keys: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        """What the head reads of each step, shape ``(batch, length, width)``: the attentional states (equation 5)."""
        reads: list[torch.Tensor] = []
        fed = torch.zeros_like(state[0])
        for token in inputs:
            state = self.cell(torch.cat([token, fed], 1), state)
            context = self.attention(state[0], keys, memory)
            fed = torch.tanh(self.readout(torch.cat([context, state[0]], 1)))
            reads.append(self.dropout(fed))
        return torch.stack(reads, 1)


def nmt(batch: int = 16, *, vocabulary: int = 4000, length: int = 30, width: int = 256, dropout: float = 0.2) -> Case:
    """A training call of :class:`NMT` with additive attention on ``batch`` random pairs of sentences."""
    return _case("nmt", batch, NMTConfig(vocabulary=vocabulary, length=length, width=width, dropout=dropout))


def nmt_luong(
    batch: int = 16, *, vocabulary: int = 4000, length: int = 30, width: int = 256, dropout: float = 0.2
) -> Case:
    """A training call of :class:`NMT` with multiplicative attention on ``batch`` random pairs of sentences."""
    config = NMTConfig(vocabulary=vocabulary, length=length, width=width, dropout=dropout, multiplicative=True)
    return _case("nmt_luong", batch, config)


def _case(name: str, batch: int, config: NMTConfig) -> Case:
    source = integers(config.vocabulary, batch, config.length)
    target = integers(config.vocabulary, batch, config.length + 1, seed=2)
    return Case(NMT(config), (source, target), name=f"{name}-d{config.width}-t{config.length}-b{batch}")

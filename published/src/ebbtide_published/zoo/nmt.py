"""Translation by an LSTM encoder and an LSTM decoder with attention, in its classic forms.

``nmt`` is Bahdanau et al. 2015 with LSTMs for GRUs: the state *before* a step asks, by an additive score, and what it
gets is an input of the step. ``nmt_luong`` is Luong et al. 2015: the state *after* a step asks, by a multiplicative
score ("general"), and the answer is fed to the next step ("input feeding"). Both decoders take one target token at a
time, so the graph is as deep as the target is long.

``NMTConfig(mlp=True)`` is Sockeye's (Hieber et al. 2017), which Echo's authors trained: Luong's order of steps with the
additive score. Encoder and decoder have one number of layers, in all forms; a decoder's layer starts from the last
state of the encoder's layer of its number, where Sockeye has a linear layer between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.case import Case
from ebbtide.errors import UsageError
from ebbtide.zoo.inputs import integers
from ebbtide_published.zoo.attention import AdditiveAttention, MlpAttention, MultiplicativeAttention

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
    mlp: bool = False
    """Luong's order of steps with the additive score, as in Sockeye."""
    layers: int = 1
    """Of the encoder, the first of which reads in both directions, and of the decoder."""
    embedding: int | None = None
    """Size of embeddings if it is not ``width``."""
    attention: int | None = None
    """Size of what the tanh of ``mlp`` is of, if it is not ``width``."""
    source_vocabulary: int | None = None
    """Number of the source's tokens if it is not ``vocabulary``."""
    source_length: int | None = None
    """Tokens of the source if they are not ``length``."""
    normalised: bool = False
    """Layer norms before the tanhs of ``mlp`` and of its readout (Sockeye's ``--layer-normalization``)."""
    tied: bool = False
    """One embedding for source and target (Sockeye's ``--weight-tying-type=src_trg``)."""
    smoothing: float = 0.0
    """Of the labels."""

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise UsageError(f"layers={self.layers}: an encoder has one layer or more")
        if self.width % 2:
            raise UsageError(f"width={self.width} is odd: the encoder's first layer has half of it for each direction")
        if self.multiplicative and self.mlp:
            raise UsageError("multiplicative and mlp are two scores; give one")
        if not self.mlp and (self.attention is not None or self.normalised):
            raise UsageError("attention and normalised belong to mlp")
        if self.tied and self.source_vocabulary not in (None, self.vocabulary):
            raise UsageError(f"tied: the source has {self.source_vocabulary} tokens, the target {self.vocabulary}")


class NMT(nn.Module):
    """A bidirectional encoder, a decoder that steps over the target's tokens, a head; the forward returns the loss."""

    def __init__(self, config: NMTConfig) -> None:
        super().__init__()
        width, embedding = config.width, config.embedding or config.width
        self.config = config
        self.source = nn.Embedding(config.source_vocabulary or config.vocabulary, embedding)
        self.target = self.source if config.tied else nn.Embedding(config.vocabulary, embedding)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.LSTM(embedding, width // 2, batch_first=True, bidirectional=True)
        self.cell = nn.LSTMCell(embedding + width, width)
        if config.multiplicative:
            self.attention = MultiplicativeAttention(width)
        elif config.mlp:
            self.attention = MlpAttention(width, config.attention or width, normalised=config.normalised)
        else:
            self.attention = AdditiveAttention(width)
        reads = 2 * width if config.multiplicative or config.mlp else 2 * width + embedding
        self.readout = nn.Linear(reads, width)
        self.head = nn.Linear(width, config.vocabulary)
        self.norm = nn.LayerNorm(width) if config.normalised else nn.Identity()
        self.upper_encoder = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(config.layers - 1))
        self.upper_cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(config.layers - 1))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of each target token given those before it and the source.

        Args:
            source: int64 tokens, shape ``(batch, source length)``.
            target: int64 tokens, shape ``(batch, length + 1)``; the first only starts the decoder.
        """
        memory, (hidden, cell) = self.encoder(self.dropout(self.source(source)))
        states = [(hidden.transpose(0, 1).flatten(1), cell.transpose(0, 1).flatten(1))]
        for layer in self.upper_encoder:
            memory, (hidden, cell) = layer(memory)
            states.append((hidden[0], cell[0]))
        inputs = self.dropout(self.target(target[:, :-1])).unbind(1)
        decode = self._luong if self.config.multiplicative or self.config.mlp else self._bahdanau
        read = decode(inputs, states, self.attention.key(memory), memory)
        scores = self.head(read).flatten(0, 1)
        return F.cross_entropy(scores, target[:, 1:].flatten(), label_smoothing=self.config.smoothing)

    def _step(self, x: torch.Tensor, states: list[_State]) -> list[_State]:
        """The states of all layers after a step that reads ``x``."""
        after = [self.cell(x, states[0])]
        for cell, state in zip(self.upper_cells, states[1:], strict=True):
            after.append(cell(after[-1][0], state))
        return after

    def _bahdanau(
        self, inputs: tuple[torch.Tensor, ...], states: list[_State], keys: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        """What the head reads of each step, shape ``(batch, length, width)``; tanh stands for the paper's maxout."""
        reads: list[torch.Tensor] = []
        for token in inputs:
            context = self.attention(states[-1][0], keys, memory)
            states = self._step(torch.cat([token, context], 1), states)
            reads.append(self.dropout(torch.tanh(self.readout(torch.cat([states[-1][0], context, token], 1)))))
        return torch.stack(reads, 1)

    def _luong(
        self, inputs: tuple[torch.Tensor, ...], states: list[_State], keys: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        """What the head reads of each step, shape ``(batch, length, width)``: the attentional states (equation 5)."""
        reads: list[torch.Tensor] = []
        fed = torch.zeros_like(states[-1][0])
        for token in inputs:
            states = self._step(torch.cat([token, fed], 1), states)
            context = self.attention(states[-1][0], keys, memory)
            fed = torch.tanh(self.norm(self.readout(torch.cat([context, states[-1][0]], 1))))
            reads.append(self.dropout(fed))
        return torch.stack(reads, 1)


def nmt(
    batch: int = 16,
    *,
    vocabulary: int = 4000,
    length: int = 30,
    width: int = 256,
    dropout: float = 0.2,
    layers: int = 1,
    config: NMTConfig | None = None,
) -> Case:
    """A training call of :class:`NMT` with additive attention on ``batch`` random pairs of sentences.

    ``config`` stands for all the sizes before it, and may be of any form.
    """
    sizes = NMTConfig(vocabulary=vocabulary, length=length, width=width, dropout=dropout, layers=layers)
    return _case("nmt", batch, config or sizes)


def nmt_luong(
    batch: int = 16,
    *,
    vocabulary: int = 4000,
    length: int = 30,
    width: int = 256,
    dropout: float = 0.2,
    layers: int = 1,
) -> Case:
    """A training call of :class:`NMT` with multiplicative attention on ``batch`` random pairs of sentences."""
    config = NMTConfig(
        vocabulary=vocabulary, length=length, width=width, dropout=dropout, layers=layers, multiplicative=True
    )
    return _case("nmt_luong", batch, config)


def _case(name: str, batch: int, config: NMTConfig) -> Case:
    source = integers(config.source_vocabulary or config.vocabulary, batch, config.source_length or config.length)
    target = integers(config.vocabulary, batch, config.length + 1, seed=2)
    layers = f"-{config.layers}L" if config.layers > 1 else ""
    return Case(NMT(config), (source, target), name=f"{name}{layers}-d{config.width}-t{config.length}-b{batch}")

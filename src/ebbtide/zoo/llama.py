"""Llama 3 in plain PyTorch: RMS norm, rotary positions, grouped attention, gated feed-forward, a loss in float32.

Sizes and structure are those of Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3, parameter for
parameter. The presets take the length of their one sequence, since that is what people ask about; under a catalogue
machine they are built without memory. ``llama_70b_lora`` freezes the model and trains adapters of low rank beside the
attention's projections (Hu et al., "LoRA", 2021), both drawn at random, so that each has a gradient from the start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebbtide.case import Case
from ebbtide.zoo.inputs import integers
from ebbtide.zoo.sizes import resized

__all__ = [
    "LLAMA_8B",
    "LLAMA_70B",
    "LLAMA_SMALL",
    "Llama",
    "LlamaSizes",
    "llama",
    "llama_8b",
    "llama_70b",
    "llama_70b_lora",
    "llama_small",
]


@dataclass(frozen=True, kw_only=True)
class LlamaSizes:
    """What a model is made of."""

    vocabulary: int = 1024
    """Tokens."""
    layers: int = 4
    """Blocks."""
    width: int = 128
    """Of the residual stream."""
    hidden: int = 448
    """Of the feed-forward."""
    heads: int = 4
    """Of queries."""
    key_heads: int = 2
    """Of keys and values."""
    base: float = 500_000.0
    """Of the rotary frequencies."""
    dtype: torch.dtype = torch.float32
    """Of parameters and activations."""
    rank: int = 0
    """Of the adapters, beside which everything else is frozen; 0 trains everything and has none."""


LLAMA_8B = LlamaSizes(
    vocabulary=128_256, layers=32, width=4096, hidden=14_336, heads=32, key_heads=8, dtype=torch.bfloat16
)
LLAMA_SMALL = LlamaSizes(vocabulary=2048, layers=8, width=512, hidden=1376, heads=8, key_heads=8, base=10_000.0)
"""The toy that Libra's code trains (thesis, NTHU 2024): 8 layers, width 512, context 256, a vocabulary of 2k."""
LLAMA_70B = replace(LLAMA_8B, layers=80, width=8192, hidden=28_672, heads=64)


class _Linear(nn.Module):
    """A projection without bias, with an adapter if ``rank`` is positive."""

    def __init__(self, inputs: int, outputs: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
        self.adapter = nn.Identity()
        if rank:
            layers = nn.Linear(inputs, rank, bias=False, dtype=dtype), nn.Linear(rank, outputs, bias=False, dtype=dtype)
            self.adapter = nn.Sequential(*layers)
        self.has_adapter = rank > 0

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x) if self.has_adapter else self.base(x)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class _Block(nn.Module):
    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.heads, self.key_heads = sizes.heads, sizes.key_heads
        head = sizes.width // sizes.heads
        key_width, rank, dtype = head * sizes.key_heads, sizes.rank, sizes.dtype
        self.attention_norm = nn.RMSNorm(sizes.width, eps=1e-5, dtype=dtype)
        self.query = _Linear(sizes.width, sizes.width, rank, dtype)
        self.key = _Linear(sizes.width, key_width, rank, dtype)
        self.value = _Linear(sizes.width, key_width, rank, dtype)
        self.out = _Linear(sizes.width, sizes.width, rank, dtype)
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5, dtype=dtype)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False, dtype=dtype)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False, dtype=dtype)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False, dtype=dtype)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), cosine, sine)
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        value = self.value(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.heads != self.key_heads)
        return self.out(y.transpose(1, 2).flatten(2))


class Llama(nn.Module):
    """A decoder whose forward gives the mean loss of each token's successor."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width, dtype=sizes.dtype)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5, dtype=sizes.dtype)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False, dtype=sizes.dtype)
        if sizes.rank:
            for key, parameter in self.named_parameters():
                parameter.requires_grad_(".adapter." in key)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Args: tokens and their successors, int64, batch x length. Returns: the loss, a scalar."""
        head, length = self.sizes.width // self.sizes.heads, tokens.shape[1]
        powers = torch.arange(0, head, 2, device=tokens.device, dtype=torch.float32) / head
        angles = torch.outer(torch.arange(length, device=tokens.device), self.sizes.base**-powers)
        angles = torch.cat((angles, angles), dim=-1)
        x = self.embedding(tokens)
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cosine, sine)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def llama(
    batch: int = 4,
    *,
    length: int = 128,
    layers: int | None = None,
    sizes: LlamaSizes | None = None,
    name: str = "llama",
) -> Case:
    """A training call of a small Llama, or of one of ``sizes``: ``batch`` sequences of ``length`` tokens."""
    sizes = resized(sizes or LlamaSizes(), layers=layers)
    tokens, targets = (integers(sizes.vocabulary, batch, length, seed=seed) for seed in (1, 2))
    return Case(Llama(sizes).train(), (tokens, targets), name=f"{name}-t{length}-b{batch}")


def llama_8b(length: int = 8192, *, layers: int | None = None) -> Case:
    """A training call of Llama 3 8B in bfloat16 on one sequence of ``length`` tokens."""
    return llama(1, length=length, layers=layers, sizes=LLAMA_8B, name="llama_8b")


def llama_70b(length: int = 8192, *, layers: int | None = None) -> Case:
    """A training call of Llama 3 70B in bfloat16 on one sequence of ``length`` tokens."""
    return llama(1, length=length, layers=layers, sizes=LLAMA_70B, name="llama_70b")


def llama_70b_lora(length: int = 8192, *, layers: int | None = None) -> Case:
    """A training call of adapters of rank 16 on a frozen Llama 3 70B in bfloat16, one sequence of ``length`` tokens."""
    sizes = replace(LLAMA_70B, rank=16)
    return llama(1, length=length, layers=layers, sizes=sizes, name="llama_70b_lora")


def llama_small(
    batch: int = 8, *, length: int = 256, layers: int | None = None, sizes: LlamaSizes = LLAMA_SMALL
) -> Case:
    """A training call of the Llama of :data:`LLAMA_SMALL` on ``batch`` sequences of ``length`` tokens."""
    return llama(batch, length=length, layers=layers, sizes=sizes, name="llama_small")

"""Models that end in a linear layer and a cross-entropy, in the forms in which people write that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["CLASSES", "FORMS", "LEFT", "TOKENS", "WIDTH", "Tower", "arguments"]

TOKENS, WIDTH, CLASSES = 384, 32, 600


class Tower(nn.Module):
    """A few layers, a head, and what ``loss`` makes of hidden states, head and labels."""

    def __init__(
        self,
        loss: Callable[..., Any],
        *,
        bias: bool = False,
        tied: bool = False,
        frozen: bool = False,
        classes: int = CLASSES,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(classes, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, classes, bias=bias)
        if tied:
            self.head.weight = self.words.weight
        self.head.requires_grad_(not frozen)
        self.loss = loss

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.loss(self.layers(self.words(tokens)), self.head, labels)


def arguments(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels; some labels are ignored."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CLASSES, (8, TOKENS // 8), generator=drawn)
    labels = torch.randint(CLASSES, (8, TOKENS // 8), generator=drawn)
    labels[:, ::7] = -100
    return tokens, labels


def _plain(h: torch.Tensor, head: nn.Module, labels: torch.Tensor, **settings: Any) -> torch.Tensor:
    return F.cross_entropy(head(h).flatten(0, 1), labels.flatten(), **settings)


def _upcast(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    logits = head(h).float()
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def _shifted(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(h).view(-1, CLASSES), F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1))


def _scaled(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    return _plain(h, head, labels) / 4 + h.square().mean()


def _returned(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    logits = head(h)
    return {"loss": F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1)), "logits": logits}


def _counted(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    return _plain(h, head, labels, reduction="sum") / (labels != -100).sum()


FORMS: dict[str, Callable[[], Tower]] = {
    "plain": lambda: Tower(_plain),
    "tied": lambda: Tower(_plain, tied=True),
    "bias": lambda: Tower(_plain, bias=True),
    "frozen": lambda: Tower(_plain, frozen=True),
    "frozen with bias": lambda: Tower(_plain, bias=True, frozen=True),
    "bfloat16, upcast": lambda: Tower(_upcast).to(torch.bfloat16),
    "shifted": lambda: Tower(_shifted),
    "scaled": lambda: Tower(_scaled),
    "returned": lambda: Tower(_returned),
    "sum over a count": lambda: Tower(_counted),
    "another ignored label": lambda: Tower(lambda h, head, y: _plain(h, head, y.clamp(0), ignore_index=0)),
}
"""That are found."""


def _capped(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((torch.tanh(head(h) / 30) * 30).flatten(0, 1), labels.flatten())


def _twice(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    logits = head(h).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten()) + 1e-4 * logits.logsumexp(1).square().mean()


def _cut(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(h)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _along_classes(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(h).transpose(1, 2), labels)


LEFT: dict[str, tuple[Callable[[], Tower], str]] = {
    "label smoothing": (lambda: Tower(lambda h, head, y: _plain(h, head, y, label_smoothing=0.1)), "label smoothing"),
    "class weights": (lambda: Tower(lambda h, head, y: _plain(h, head, y, weight=torch.ones(CLASSES))), "weights"),
    "no reduction": (lambda: Tower(lambda h, head, y: _plain(h, head, y, reduction="none").sum()), "no single value"),
    "capped": (lambda: Tower(_capped), "no product of a linear layer alone"),
    "cut": (lambda: Tower(_cut), "logits are cut before the loss"),
    "classes in the middle": (lambda: Tower(_along_classes), "not the last dimension"),
    "read twice": (lambda: Tower(_twice), "another reader"),
}
"""That look alike and are left, with part of the reason."""

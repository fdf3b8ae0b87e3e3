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


def _cut(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """As GPT-2 had it for years."""
    logits = head(h)
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, CLASSES), labels[..., 1:].contiguous().view(-1))


def _cast_and_cut(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    logits = head(h).float()
    return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def _cut_and_cast(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    logits = head(h)
    loss = F.cross_entropy(logits[:, 2:].reshape(-1, CLASSES).float(), labels[:, 2:].reshape(-1))
    return {"loss": loss, "logits": logits}


def _one_sequence(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """Its cut is no copy."""
    logits = head(h.flatten(0, 1)[None])
    return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), labels.flatten()[1:], reduction="sum")


def _likelihood(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    return nn.NLLLoss()(F.log_softmax(head(h), dim=-1, dtype=torch.float32).flatten(0, 1), labels.flatten())


def _masked(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    losses = _plain(h, head, labels, reduction="none").view_as(labels)
    mask = (labels != -100) / (1 + labels % 3)
    return (losses * mask).sum() / mask.sum()


def _cut_and_masked(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(head(h)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return losses.view(len(labels), -1).mean(1).square().sum()


def _smoothed(h: torch.Tensor, head: nn.Module, labels: torch.Tensor, **settings: Any) -> torch.Tensor:
    return _plain(h, head, labels, label_smoothing=0.1, **settings)


def _smoothed_and_cut(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    logits = head(h).float()[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.2)


def _weighted(h: torch.Tensor, head: nn.Module, labels: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Classes that count more the higher their number; the first not at all."""
    return _plain(h, head, labels, weight=torch.arange(CLASSES) / CLASSES, **settings)


def _capped(h: torch.Tensor, head: nn.Module, labels: torch.Tensor, **settings: Any) -> torch.Tensor:
    return F.cross_entropy((torch.tanh(head(h) / 3) * 3).flatten(0, 1), labels.flatten(), **settings)


def _capped_and_returned(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """As Hugging Face's Gemma 2, with labels that are shifted."""
    logits = 3 * torch.tanh(head(h) / 3)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    return {"loss": F.cross_entropy(logits.float().view(-1, CLASSES), shifted), "logits": logits}


def _cast_and_capped(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((head(h).float() / 3).tanh().mul(3)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _scaled_logits(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((head(h) * 0.7).flatten(0, 1), labels.flatten())


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
    "cut": lambda: Tower(_cut),
    "cut, bias": lambda: Tower(_cut, bias=True),
    "cut, tied": lambda: Tower(_cut, tied=True),
    "cut, frozen": lambda: Tower(_cut, frozen=True),
    "bfloat16, cast and cut": lambda: Tower(_cast_and_cut).to(torch.bfloat16),
    "bfloat16, cut and cast, returned": lambda: Tower(_cut_and_cast).to(torch.bfloat16),
    "one sequence": lambda: Tower(_one_sequence),
    "likelihood": lambda: Tower(_likelihood),
    "bfloat16, likelihood": lambda: Tower(_likelihood).to(torch.bfloat16),
    "no reduction": lambda: Tower(_masked),
    "no reduction, cut": lambda: Tower(_cut_and_masked),
    "another ignored label": lambda: Tower(lambda h, head, y: _plain(h, head, y.clamp(0), ignore_index=0)),
    "smoothed": lambda: Tower(_smoothed),
    "smoothed, bias": lambda: Tower(_smoothed, bias=True),
    "smoothed, tied": lambda: Tower(_smoothed, tied=True),
    "smoothed, frozen": lambda: Tower(_smoothed, frozen=True),
    "smoothed, sum": lambda: Tower(lambda h, head, y: _smoothed(h, head, y, reduction="sum") / 64),
    "smoothed, no reduction": lambda: Tower(lambda h, head, y: _smoothed(h, head, y, reduction="none").mean()),
    "bfloat16, smoothed and cut": lambda: Tower(_smoothed_and_cut).to(torch.bfloat16),
    "capped": lambda: Tower(_capped),
    "capped, bias": lambda: Tower(_capped, bias=True),
    "capped, frozen": lambda: Tower(_capped, frozen=True),
    "capped, smoothed": lambda: Tower(lambda h, head, y: _capped(h, head, y, label_smoothing=0.1)),
    "bfloat16, capped and returned": lambda: Tower(_capped_and_returned).to(torch.bfloat16),
    "bfloat16, cast, capped and cut": lambda: Tower(_cast_and_capped).to(torch.bfloat16),
    "scaled logits, tied": lambda: Tower(_scaled_logits, tied=True),
    "a hook on the head that scales": lambda: _hooked_head(),
}
"""That are found."""


def _twice(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    logits = head(h).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten()) + 1e-4 * logits.logsumexp(1).square().mean()


def _along_classes(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(h).transpose(1, 2), labels)


def _picked(
    h: torch.Tensor, head: nn.Module, labels: torch.Tensor, pick: Callable[[torch.Tensor], torch.Tensor], first: int = 0
) -> torch.Tensor:
    logits = pick(head(h)[..., first:])
    return F.cross_entropy(logits.flatten(0, 1), (pick(labels) - first).clamp(-1).flatten(), ignore_index=-1)


def _own_loss(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """Of the same value as ``cross_entropy``, and of other bits."""
    logits = head(h)
    return (logits.logsumexp(-1) - logits.gather(-1, labels.clamp(0)[..., None])[..., 0]).mean()


def _penalty(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """Another loss of the log-probabilities, whose gradient is no number per row."""
    chances = F.log_softmax(head(h).flatten(0, 1), 1)
    entropy = (chances.exp() * chances).sum(1).mean()
    return F.nll_loss(chances, labels.flatten()) - entropy / 100


def _soft(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(h).flatten(0, 1), F.one_hot(labels.clamp(0).flatten(), CLASSES).float())


def _hooked_logits(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    logits = head(h)
    logits.register_hook(lambda gradient: gradient * 2)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _hooked_head() -> Tower:
    tower = Tower(_plain)
    tower.head.register_forward_hook(lambda _module, _inputs, logits: logits * 0.5)
    return tower


def _tempered(h: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((head(h) * h.square().mean().rsqrt()).flatten(0, 1), labels.flatten())


LEFT: dict[str, tuple[Callable[[], Tower], str]] = {
    "an entropy": (
        lambda: Tower(_penalty),
        "another loss of the same logits",
    ),
    "class weights": (lambda: Tower(_weighted), "classes have weights"),
    "class weights and smoothed labels": (
        lambda: Tower(lambda h, head, y: _weighted(h, head, y, label_smoothing=0.1)),
        "classes have weights",
    ),
    "bent otherwise": (
        lambda: Tower(lambda h, head, y: F.cross_entropy(torch.sigmoid(head(h)).flatten(0, 1), y.flatten())),
        "no product of a linear layer alone",
    ),
    "a learned temperature": (lambda: Tower(_tempered), "scaled by a tensor"),
    "capped after a cut": (
        lambda: Tower(
            lambda h, head, y: _picked(h, head, y, lambda x: x[:, :-1].tanh() if x.is_floating_point() else x[:, :-1])
        ),
        "after they are cut",
    ),
    "cut twice": (lambda: Tower(lambda h, head, y: _picked(h, head, y, lambda x: x[:, :-1][:, 2:])), "more than once"),
    "cut by steps": (lambda: Tower(lambda h, head, y: _picked(h, head, y, lambda x: x[:, ::2])), "by steps"),
    "classes cut": (lambda: Tower(lambda h, head, y: _picked(h, head, y, lambda x: x, 3)), "along the classes"),
    "rows picked": (lambda: Tower(lambda h, head, y: _picked(h, head, y, lambda x: x[:, [0, 5, 7]])), "rows of the"),
    "classes in the middle": (lambda: Tower(_along_classes), "not the last dimension"),
    "a loss of its own": (lambda: Tower(_own_loss), "loss of its own"),
    "soft labels": (lambda: Tower(_soft), "soft labels"),
    "a hook on the logits": (lambda: Tower(_hooked_logits), "other readers"),
    "read twice": (lambda: Tower(_twice), "another reader"),
}
"""That look alike and are left, with part of the reason."""

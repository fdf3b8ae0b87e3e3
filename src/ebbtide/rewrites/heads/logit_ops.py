"""What is made of the logits, element by element, before their softmax: scaled, capped, cast to another type.

It is written as text, for ops take no lists of several types: ``"div 30.0, tanh, mul 30.0, cast"`` caps logits at 30
and casts them then. Each step is torch's own op, and its gradient is the op that autograd has for it. They are called
on slices of what eager calls them on whole, which the facts hold against each other (``heads.facts``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["CAST", "DIV", "MUL", "TANH", "apply_text", "caps", "taken_back"]

DIV, MUL, TANH, CAST = "div", "mul", "tanh", "cast"
"""The steps: the first two by a number, the last to the type of the softmax; it is done last where it is not named."""
_aten = torch.ops.aten


def _steps(text: str) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for each in text.split(", ") if text else ():
        kind, _, number = each.partition(" ")
        found.append((kind, float(number or 0)))
    return found


def caps(text: str) -> int:
    """How many steps have a gradient that reads what they have made."""
    return sum(kind == TANH for kind, _ in _steps(text))


def apply_text(text: str, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """What the softmax reads, of type ``dtype``, and what :func:`taken_back` needs of the way there."""
    kept: list[Tensor] = []
    for kind, number in _steps(text):
        if kind == DIV:
            logits = _aten.div.Tensor(logits, number)
        elif kind == MUL:
            logits = _aten.mul.Tensor(logits, number)
        elif kind == CAST:
            logits = logits.to(dtype)
        else:
            logits = _aten.tanh(logits)
            kept.append(logits)
    return logits.to(dtype), kept


def taken_back(text: str, gradient: Tensor, saved: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The gradient of the logits, of type ``dtype``, from that of what the softmax reads."""
    waiting = list(saved)
    if text and not any(kind == CAST for kind, _ in _steps(text)):
        gradient = gradient.to(dtype)
    for kind, number in reversed(_steps(text)):
        if kind == DIV:
            gradient = _aten.div.Tensor(gradient, number)
        elif kind == MUL:
            gradient = _aten.mul.Tensor(gradient, number)
        elif kind == CAST:
            gradient = gradient.to(dtype)
        else:
            gradient = _aten.tanh_backward(gradient, waiting.pop())
    return gradient.to(dtype)

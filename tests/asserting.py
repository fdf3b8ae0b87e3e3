"""Forwards' assertions, in a module that pytest does not rewrite."""

from __future__ import annotations

import torch


def all_below(x: torch.Tensor) -> None:
    assert (x.abs() <= 1).all(), "above one"


def wordless(x: torch.Tensor) -> None:
    assert torch.isfinite(x).all()


def number(x: torch.Tensor) -> None:
    assert x.abs().max().item() + 1 <= 2


def literal(x: torch.Tensor) -> None:
    assert x.shape[0] != 7, "seven: rows"


def formatted(x: torch.Tensor) -> None:
    assert x.shape[0] != 7, f"{x.shape[0]} rows"


def none(x: torch.Tensor) -> None:
    assert x.shape[0] != 7


def branching(x: torch.Tensor) -> None:
    assert not torch.isnan(x).any()


def index(x: torch.Tensor) -> None:
    assert x.argmax().item() >= 0

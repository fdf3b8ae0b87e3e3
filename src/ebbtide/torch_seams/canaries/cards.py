"""The canary of ``cards``; without a card it sees no more than a name."""

from __future__ import annotations

import inspect

import torch

from ebbtide.torch_seams.canaries.registry import canary, expect
from ebbtide.torch_seams.cards import keep_waiting

__all__: list[str] = []


@canary
def a_card_can_be_kept_waiting() -> None:
    """A stream can be told to do nothing for a number of cycles."""
    expect(list(inspect.signature(torch.cuda._sleep).parameters) == ["cycles"], "torch.cuda._sleep takes others")
    if torch.cuda.is_available():
        keep_waiting(1e-6)

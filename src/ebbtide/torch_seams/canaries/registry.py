"""The list of canaries: small functions that raise if something that Ebbtide relies on of torch is different."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ebbtide.torch_seams.fake_tensors import without_modes

__all__ = ["CANARIES", "canary", "expect", "run"]

CANARIES: dict[str, Callable[[], None]] = {}
"""By name; each docstring is the fact."""


def canary(check: Callable[[], None]) -> Callable[[], None]:
    """Enter ``check`` under its name."""
    CANARIES[check.__name__] = check
    return check


def expect(holds: object, otherwise: str) -> None:
    """Raise unless ``holds``; unlike ``assert`` also where Python optimises."""
    if not holds:
        raise RuntimeError(otherwise)


def run(name: str) -> None:
    """Run one canary under settings of its own.

    Raises:
        Exception: any, if its fact does not hold.
    """
    with without_modes(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        CANARIES[name]()

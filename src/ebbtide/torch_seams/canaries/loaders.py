"""The canary of ``loaders``."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from ebbtide.torch_seams import loaders
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def loaders_tell_what_they_give() -> None:
    """Every batch is told, the very tensors, and nothing once the patch is closed."""
    told: list[torch.Tensor] = []
    with torch.random.fork_rng(devices=[]):  # an iterator draws its workers' seed
        loader = DataLoader([torch.ones(2), torch.zeros(2)], batch_size=1)  # type: ignore[arg-type]
        with loaders.each_batch(told.append):
            given = list(loader)
        expect(len(told) == 2 and all(one is other for one, other in zip(told, given, strict=True)), "untold batches")
        expect(len(list(loader)) == 2 == len(told), "a closed patch tells")

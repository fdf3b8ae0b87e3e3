"""Every test on a card begins with nothing of those before; where bytes are held to a percent, blocks are exact."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

EXACT = ("test_cuda_map", "test_cuda_steps", "test_cuda_moves")
"""Files whose tensors are of a few MiB: by default the allocator hands out blocks of up to 1 MiB more (limits.md)."""


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    exact = request.node.path.stem in EXACT
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{exact}")
    yield
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")

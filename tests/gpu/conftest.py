"""Every test on a card begins with nothing of those before; where bytes are held to a percent, blocks are exact."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXACT = ("test_cuda_map", "test_cuda_steps", "test_cuda_moves")
"""Files whose tensors are of a few MiB: by default the allocator hands out blocks of up to 1 MiB more (limits.md)."""


SMALL = "ignore:the step took .* off the predicted:UserWarning"
"""Where blocks are not exact, steps of some MiB are further from their prediction than steps that people train with."""
TRAINERS = ("transformers", "lightning", "accelerate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings that say nothing about these tests: of small steps, and of whichever trainers are installed."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings(SMALL))
            if any(name in item.name for name in TRAINERS):
                item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    exact = request.node.path.stem in EXACT
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{exact}")
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")

"""200 models drawn by a generator: same bits, within budget, as predicted. A seed is a model; see the generator."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.record import Row
from harness.verified import grid_rows

TITLE = "Random models: planned step against captured order"
MODELS = 200
BATCH = 10  # seeds per process
CASES = tuple(f"{first}-{first + BATCH - 1}" for first in range(0, MODELS, BATCH))
QUICK = CASES[:1]
SHARES = (0.4,)
EFFORT = 300


def rows(case: str, quick: bool) -> Iterator[Row]:
    from random_models import random_case  # tests/random_models.py; tests/ is on the path of a benchmark's children

    first, last = (int(part) for part in case.split("-"))
    torch.set_num_threads(1)
    for seed in range(first, last + 1):
        torch.manual_seed(seed)
        torch._dynamo.reset()
        yield from grid_rows("random", f"seed {seed}", random_case(seed), shares=SHARES, effort=EFFORT)
        if quick:
            return

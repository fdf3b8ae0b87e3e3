"""Random training steps as users write them: one seed gives a model, the arguments of a call and a recipe of both.

Definitions:
1. A *block* maps a tensor of rows (N, C), tokens (B, T, C) or an image (B, C, H, W) to one of the same kind, or of
   another. It is drawn by weight, builds its own layers for the shape it meets, and never changes its input in place.
2. A *nest* is a block around other blocks that keep the shape: a residual branch, a loop, a checkpoint, ...
3. A *recipe* is the model in one line, blocks in order, what a nest holds in parentheses.
4. No shape and no branch depends on values, sizes are such that a tensor between blocks has about 8 000 elements.
"""

from __future__ import annotations

import torch

from ebbtide.case import Case

# Each registers its blocks.
from random_models import foreign, layers, memory, nests, sequences, values  # noqa: F401
from random_models.block import BLOCKS, IMAGE, ROWS, TOKENS, Draw
from random_models.model import RandomModel

__all__ = ["BLOCKS", "EAGER_DIFFERS", "RandomModel", "random_case"]

EAGER_DIFFERS = {
    "statistics:prod": "eager's backward of prod looks at the values: it divides where no factor is zero",
    "recurrent:LSTM": "eager takes oneDNN's kernel, which sums in another order",
}
"""Parts of recipes whose captured step differs from eager in bits, and why."""


def random_case(seed: int, banned: frozenset[str] = frozenset()) -> Case:
    """The training call that ``seed`` stands for; neither it nor its making depends on the global generators.

    Args:
        seed: any integer.
        banned: names of blocks not to draw.
    """
    draw = Draw(seed)
    draw.banned = banned
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = RandomModel(draw, draw.choice([ROWS, TOKENS, IMAGE]))
    args, kwargs = model.call()
    return Case(model, args, kwargs, name=f"random {seed}: {model.recipe}")

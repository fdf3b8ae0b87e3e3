"""The rows of the tables of Meng et al. (ML Systems Workshop at NIPS 2017, paper 18), and models of those sizes.

Published are a model, its batch or its megabytes without and with what they add, and a card: a Tesla M40 of 12 GB under
TensorFlow 1.2. Sizes are not, but the depths, the numbers of layers and the time steps that the rows are named after.
What is left open is *fitted* (of DCGAN two numbers, else one a row), so that the unplanned step reaches their batch
without, within :data:`TOLERANCE`; ``size`` names it first. All else is that of the model's own paper or the zoo's
default; language models have the vocabulary of Penn Treebank, which the paper names.

1. Tables 1a and 1b (M1, M2) are of swapping alone, tables 2a and 2b (M3, M4) of operators that recompute.
2. The card has ``memory_bytes`` of the catalogue, 11,998,855,168: all of it is the budget, in M1, M3 and M4.
3. Their MB is taken as 10^6 bytes, the stricter reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ebbtide import Case
from ebbtide.step.machine import machine_named
from ebbtide.zoo.resnet import resnet50, resnet101, resnet200
from ebbtide_published.zoo.dcgan import dcgan
from ebbtide_published.zoo.inception import inception_v3
from ebbtide_published.zoo.lstm_lm import lstm_lm
from ebbtide_published.zoo.nmt import nmt
from ebbtide_published.zoo.resnet import resnet1001, resnet2000

__all__ = ["CARD", "MB", "TABLES", "TOLERANCE", "Published"]

CARD = machine_named("m40-12gb")
MB = 10**6
TOLERANCE = 0.05


@dataclass(frozen=True)
class Published:
    """A row of a table.

    Attributes:
        make: its case at a batch.
        size: of the model; what is fitted comes first.
        without: their batch, in M2 their MB; ``None`` where they ran out of memory.
        reached: the same with their changes.
    """

    make: Callable[[int], Case]
    size: str
    without: int | None
    reached: int


def _translation(length: int, width: int, without: int, reached: int) -> Published:
    size = f"width {width}; {length} steps, vocabulary 4000"
    return Published(partial(nmt, length=length, width=width), size, without, reached)


def _language(layers: int, size: str, without: int, reached: int, *, width: int, length: int = 20) -> Published:
    make = partial(lstm_lm, layers=layers, width=width, length=length)
    return Published(make, f"{size}; {layers} layers, vocabulary 10000", without, reached)


def _residual(make: Callable[..., Case], without: int | None, reached: int) -> Published:
    return Published(partial(make, image=224), "224 pixels, nothing fitted", without, reached)


TABLES: dict[str, dict[str, Published]] = {
    "m1": {
        "resnet50": Published(partial(resnet50, image=220), "220 pixels", 144, 664),
        "inception_v3": Published(partial(inception_v3, image=235), "235 pixels", 208, 548),
        "dcgan": Published(partial(dcgan, image=512, width=80), "512 pixels, width 80", 24, 48),
        "nmt": _translation(40, 2080, 496, 824),
    },
    "m2": {
        "resnet101": _residual(resnet101, 5815, 2660),
        "resnet200": _residual(resnet200, 10662, 3052),
        "resnet1001": _residual(resnet1001, None, 5979),
        "resnet2000": _residual(resnet2000, None, 10650),
    },
    "m3": {
        # Three of logits' size at the loss: with 35 steps, the floor of row 1 at their batch would be above the card.
        "1 layer": _language(1, "width 4800; 20 steps", 1800, 3000, width=4800),
        "4 layers": _language(4, "width 3920; 20 steps", 750, 1500, width=3920),
        "8 layers": _language(8, "width 3800; 20 steps", 350, 900, width=3800),
        # With 20 steps, the weights that keep-all's batch asks for would fill the card.
        "16 layers": _language(16, "74 steps; width 2592", 75, 280, width=2592, length=74),
    },
    "m4": {
        "50 steps": _translation(50, 2080, 350, 1100),
        "100 steps": _translation(100, 2416, 90, 550),
        "200 steps": _translation(200, 2752, 20, 230),
        "400 steps": _translation(400, 4800, 2, 60),
    },
}

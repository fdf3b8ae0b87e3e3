"""M1: the largest batch of convolutional networks and a translation model on 12 GB, by swapping (table 1a)."""

from __future__ import annotations

from collections.abc import Iterator

from harness.record import Row
from questions.swap_cells import MOST_OVERHEAD, batch_rows, batched_of, methods
from questions.swap_sizes import TABLES

TITLE = "M1: batch on a Tesla M40 of 12 GB at 10 % overhead, by roofline (Meng et al. 2017, table 1a)"
CASES = tuple(TABLES["m1"])
QUICK = ("dcgan",)


def rows(case: str, quick: bool) -> Iterator[Row]:
    against = methods()[:1] if quick else methods()
    cell = TABLES["m1"][case]
    yield from batch_rows("m1", case, cell, batched_of(cell), against, MOST_OVERHEAD)

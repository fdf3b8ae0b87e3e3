"""M3: the largest batch of a language model of 1 to 16 LSTMs on 12 GB, by operators that recompute (table 2a).

The table has no limit on time. ``echo`` recomputes as their operators do. One width does not fit all rows: each has
its own, and the deepest its own number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.record import Row
from questions.swap_cells import batch_rows, batched_of, methods
from questions.swap_sizes import TABLES

TITLE = "M3: batch of LSTMs on a Tesla M40 of 12 GB, by roofline (Meng et al. 2017, table 2a)"
CASES = tuple(TABLES["m3"])
QUICK = ("1 layer",)


def rows(case: str, quick: bool) -> Iterator[Row]:
    against = methods("echo")[:1] if quick else methods("echo")
    cell = TABLES["m3"][case]
    yield from batch_rows("m3", case, cell, batched_of(cell), against, None)

"""What it costs that ranks agree: of a first call what is not waiting, and of a steady step all of it.

1. Ranks come to each question of the first call one after the other, half a second apart: what the last takes is no
   waiting. It is measured with the connection to the store, which ``fit`` makes.
2. In a steady step the hooks before the wrapper's forward and before the planned backward run, the wrapper is looked
   up, and a backward's return is seen. Each is called many times as a step calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from harness.record import Row, at_most
from rank_cases.launch import run_ranks

TITLE = "Agreement: milliseconds of a first call besides waiting, microseconds of a steady step"
CASES = ("2 ranks", "4 ranks")
QUICK = CASES[:1]
MOST_MILLISECONDS, MOST_MICROSECONDS = 5.0, 50.0


def rows(case: str, quick: bool) -> Iterator[Row]:
    """The last rank's, at the median of several runs."""
    found = [run_ranks("agreement", int(case.split()[0]), stays=False) for _ in range(1 if quick else 5)]
    first = median(each[-1].found["first_seconds"] for each in found)
    steady = median(each[-1].found["steady_seconds"] for each in found)
    yield Row(
        "agreement",
        {"case": case, "first_milliseconds": 1e3 * first, "steady_microseconds": 1e6 * steady, "runs": len(found)},
        (
            at_most("milliseconds of a first call", 1e3 * first, MOST_MILLISECONDS),
            at_most("microseconds of a steady step", 1e6 * steady, MOST_MICROSECONDS),
        ),
    )

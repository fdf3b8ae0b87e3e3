"""What may leave ranks waiting for one another: an error on all of them, or a training with eager's bits."""

from __future__ import annotations

from collections.abc import Iterator

from harness.record import Row, at_most, holds
from rank_cases.cases import MODES
from rank_cases.hazards import HAZARDS, judge

TITLE = "Hazards: what goes wrong on one rank, over gloo with a timeout of 15 s, and what each rank ends with"
CASES = tuple(f"{mode}, {ranks} ranks" for ranks in (2, 4) for mode in MODES)
QUICK = CASES[:1]
APART_SECONDS = 5.0
"""Between the errors of the first and the last rank, where all ranks live."""


def rows(case: str, quick: bool) -> Iterator[Row]:
    """One for each hazard; in other modes than the first those that concern what the wrapper exchanges."""
    mode, _, count = case.partition(", ")
    wanted = [each for each in HAZARDS if each.is_tried_in(mode)]
    for hazard in wanted[:2] if quick else wanted:
        found = judge(hazard, mode, int(count.split()[0]))
        if found.wrong:
            print(f"{case}: {hazard.name}: {found.wrong}", flush=True)
        hangs = sum(each.error == "hangs" for each in found.outcomes)
        checks = [at_most("ranks that hang", hangs, 0), holds("as it has to be", not found.wrong)]
        if found.apart_seconds is not None:
            checks.append(at_most("seconds between the ranks' errors", found.apart_seconds, APART_SECONDS))
        yield Row(
            "hazards",
            {
                "case": case,
                "hazard": hazard.name,
                "outcome": ", ".join(sorted({each.error or "trains" for each in found.outcomes})),
                "apart_seconds": found.apart_seconds,
                "hangs": hangs,
            },
            tuple(checks),
        )

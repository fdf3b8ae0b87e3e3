"""What each step of Libra's refinement gives: switched off in turn, by the settings of ``libra``.

At keep-all's largest batch, within shares of the unplanned peak. A step without which the plan
is cheaper is one that costs time there; that is no miss.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.batched import planned, unplanned_peak
from harness.record import Row, holds
from questions.libra_models import BUDGET, MACHINE, MODELS, batched

TITLE = "libra without each of its steps: overhead in percent, what leaves and how, CPU seconds of the plan"
CASES = tuple(MODELS)
QUICK = ("llama_small",)
SHARES = (0.8, 0.6, 0.4, 0.25)
STEPS = ("", "all_swapped=false", "recompute_first=false", "new_peaks=false", "refinement=false")


def rows(case: str, quick: bool) -> Iterator[Row]:
    model = batched(case)
    batch = model.unplanned(BUDGET, MODELS[case][1][0])
    step = model.captured(batch)
    for share in SHARES[:1] if quick else SHARES:
        for without in STEPS:
            columns: dict[str, object] = {"case": case, "batch": batch, "budget": f"{share:.0%}", "method": without}
            legal = True
            for overlap in (False, True):
                settings = ",".join([*([without] if without else []), f"overlap={str(overlap).lower()}"])
                found = planned(step, int(share * unplanned_peak(step)), f"libra:{settings}", MACHINE, tiers=("host",))
                kind = "overlapping" if overlap else "blocking"
                columns[kind] = found.answer.status.name if found.overhead is None else 100 * found.overhead
                columns |= {"what leaves": found.answer.notes.get("chosen", ""), f"{kind} cpu s": found.cpu_seconds}
                legal = legal and (found.overhead is not None or found.answer.schedule is None)
            yield Row("steps", columns, (holds("legal", legal),))

"""Does every trainer keep the promises, whatever people do with it? Trainers times what they are used with.

    python benchmarks/trainers.py [--list] [--only NAME ...] [--jobs N] [--out FILE]

A cell is a situation (``tests/situations``, as in ``promises.py``): the trainer with a budget against the same trainer
without. Losses, parameters and random state have to be equal in every bit, the peak of every step within the budget by
a preloaded counter of the allocator's calls, every training step planned, and captures as few as shapes, of which
those after the first four share one. NAME is a trainer, a cell or a part of a situation's name. Results of a run of
some cells replace theirs; the others' stay.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from harness.origin import cases_of_this_version
from harness.record import Check, Record, Row, at_least, at_most
from situations.oracle import SLACK_BYTES
from situations.registry import Situation, all_situations
from situations.runner import KINDS, listed, misses, run_all, why

SEEDS = {"weights and inputs": 0, "planners": 0}
NO_PEER = (
    "The reference is the same trainer with the eager model; the trainers' own means are in some of its "
    "situations, with their bits, not in a race."
)

OUT = Path(__file__).resolve().parent / "results" / "trainers.json"
VERSIONS = ("transformers", "accelerate", "peft", "trl", "lightning")
TITLES = {
    "matrix": "Trainers and what they are used with",
    "counts": "Counts",
    "oracle": "The oracle",
    "cells": "Cells",
}
CELLS = (
    "plain", "accumulation", "clipping", "bf16", "evaluation", "resumed", "last batch", "lengths", "smoothing", "fork",
    "spawn",
)  # fmt: skip
"""Evaluation in between, saved and resumed, a smaller last batch, lengths that vary, label smoothing; and how the
workers of the data loader start."""
_VARIANTS = {
    "accumulation": "accumulated", "clipping": "clipped", "evaluation": "evaluated", "last batch": "last_batch",
    "smoothing": "smoothed", "fork": "workers", "spawn": "spawned",
}  # fmt: skip


def _of(prefix: str, **others: str) -> dict[str, str]:
    """Situations called ``prefix_variant``, but for ``others``."""
    return {cell: others.get(cell.replace(" ", "_"), f"{prefix}_{_VARIANTS.get(cell, cell)}") for cell in CELLS}


def _accelerate(order: str) -> dict[str, str]:
    apart = {name: f"accelerate_{name}_{order}" for name in ("last_batch", "lengths", "resumed")}
    workers = {name: f"accelerate_workers_{name}_{order}" for name in ("fork", "spawn")}
    return {cell: f"{name}_{order}" for cell, name in _of("accelerate_loop").items()} | {
        cell: name for cell in CELLS if (name := (apart | workers).get(cell.replace(" ", "_")))
    }


def _supervised(prefix: str) -> dict[str, str]:
    apart = {name: f"{name}_of_{prefix}" for name in ("last_batch", "lengths", "resumed")}
    return _of(prefix, **apart)


TRAINERS: dict[str, dict[str, str]] = {
    "Trainer": _of("trainer_callback", accumulation="trainer_callback_accumulation"),
    "Trainer, LoRA": _of("peft_trainer_lora", accumulation="peft_trainer_lora_accumulation"),
    "accelerate, fit first": _accelerate("fit_first"),
    "accelerate, prepare first": _accelerate("prepare_first"),
    "Lightning": _of(
        "lightning_callback",
        bf16="lightning_callback_bf16_mixed",
        resumed="lightning_resumed",
        last_batch="lightning_last_batch",
        lengths="lightning_lengths",
        smoothing="lightning_module_is_smoothed",
        fork="lightning_module_is_workers",
        spawn="lightning_module_is_spawned",
    ),
    "SFTTrainer": _supervised("sft"),
    "SFTTrainer, LoRA": _supervised("sft_lora"),
    "DPOTrainer": _of("dpo"),
    "DDP, two processes": _of(
        "ddp", last_batch="ddp_shapes_last_batch", lengths="ddp_shapes_lengths", resumed="ddp_saved_resumed"
    ),
}
"""The situation of every cell."""
_PLACES = {name: (trainer, cell) for trainer, cells in TRAINERS.items() for cell, name in cells.items()}


def main() -> int:
    options = _options()
    known = cases_of_this_version(options.out) if options.release else set[str]()
    wanted = [each for each in _wanted(options.only) if each.name not in known]
    if options.list:
        for each in wanted:
            print(f"{', '.join(_PLACES[each.name]):40} {listed(each)}")
        print(f"{len(wanted)} cells")
        return 0
    settings = {"slack_bytes": SLACK_BYTES} | {name: version(name) for name in VERSIONS}
    record = Record("trainers", TITLES, settings)
    before = Record.read(options.out, TITLES) if options.out.exists() and (options.only or options.release) else None
    sample = bool(options.only) and options.out.resolve() != OUT.resolve()
    run_all(record, wanted, options.jobs, lambda: _joined(before, record, sample=sample).write(options.out), _cell)
    record = _joined(before, record, sample=sample)
    record.write(options.out)
    print(f"\n{record.markdown()}")
    return 0 if record.passed else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="trainers, cells or parts of situations")
    parser.add_argument("--release", action="store_true", help="run what was not made with this version")
    parser.add_argument("--list", action="store_true", help="print the cells and run nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (default: 1)")
    parser.add_argument("--out", type=Path, default=OUT, help="result file (default: results/trainers.json)")
    return parser.parse_args()


def _wanted(only: list[str]) -> list[Situation]:
    """Those that ``only`` names: a trainer or a cell as it is, else whatever contains the word."""
    known, exact = all_situations(), {*TRAINERS, *CELLS}

    def is_named(name: str) -> bool:
        return any(word in _PLACES[name] if word in exact else word in name for word in only)

    # Situations that share an imported torch come one after the other.
    found = [each for name, each in known.items() if name in _PLACES and (not only or is_named(name))]
    if not found:
        sys.exit(f"there is no cell {' '.join(only)}; --list prints them")
    return found


def _cell(row: Row) -> Row:
    """A situation's row as the cell's."""
    given = row.columns
    trainer, cell = _PLACES[given["case"]]
    eager = given.get("eager_bytes") or 0
    columns: dict[str, Any] = {
        "case": given["case"],
        "trainer": trainer,
        "cell": cell,
        "eager_bytes": eager,
        "budget_bytes": given.get("budget_bytes"),
        "peak_bytes": given.get("peak_bytes"),
        "share of eager's": round(given["peak_bytes"] / eager, 3) if eager and given.get("peak_bytes") else None,
        "steps over by a stated limit": given.get("steps_over"),
        "planned_calls": given.get("planned_calls"),
        "calls": given.get("calls"),
        "captures": given.get("captures"),
        "captures_expected": given.get("captures_expected"),
        "lengths": given.get("lengths"),
        "seconds": given["seconds"],
        "why": given.get("why", ""),
    }
    return Row("cells", columns, row.checks)


def _joined(before: Record | None, record: Record, *, sample: bool = False) -> Record:
    """``record`` with what an earlier run knows of other cells, the matrix and the counts.

    Of a ``sample`` it is asked that its own cells are right, else that all there are have run.
    """
    joined = Record(record.name, record.titles, record.settings, record.machine)
    if before is not None:
        joined.take(before)
    joined.take(record)
    joined.rows = [row for row in joined.rows if row.columns.get("case") in {*_PLACES, "counter"}]
    joined.failures = [each for each in joined.failures if each["case"] in _PLACES]
    rows = {row.columns["case"]: row for row in joined.rows if row.question == "cells"}
    failed = {each["case"]: each["error"] for each in joined.failures}
    joined.rows += [_line_of(trainer, rows, failed) for trainer in TRAINERS]
    joined.rows.append(_counts(list(rows.values()), len(rows) + len(failed) if sample else len(_PLACES)))
    return joined


def _line_of(trainer: str, rows: dict[str, Row], failed: dict[str, str]) -> Row:
    """A trainer's line of the matrix."""
    line = {"trainer": trainer}
    for cell, name in TRAINERS[trainer].items():
        if (row := rows.get(name)) is not None:
            missed = "; ".join(filter(None, [why(row, 160), *(c.what for c in row.checks if not c.passed)]))
            line[cell] = "equal" if row.passed else f"MISS: {missed}"
        else:
            line[cell] = f"MISS: {failed[name]}" if name in failed else "not run"
    return Row("matrix", line)


def _counts(rows: list[Row], asked: int) -> Row:
    planned, calls = (sum(row.columns[name] or 0 for row in rows) for name in ("planned_calls", "calls"))
    share = planned / calls if calls else 0.0
    missed = {kind: misses(rows, kind) for kind in KINDS}
    right = sum(row.passed for row in rows)
    columns = {"cells": len(rows), "right": right, "planned_calls": planned, "calls": calls}
    checks: list[Check] = [
        at_least("cells", len(rows), asked),
        at_least("right", right, asked),
        at_least("steps planned", share, 1.0),
        *(at_most(kind, count, 0) for kind, count in missed.items()),
    ]
    return Row("counts", {**columns, "steps planned": share, **missed}, tuple(checks))


if __name__ == "__main__":
    sys.exit(main())

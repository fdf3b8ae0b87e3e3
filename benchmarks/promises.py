"""Do the promises hold in real training code? Situations, each run by eager and under a budget, all steps.

    python benchmarks/promises.py [--list] [--only NAME ...] [--moving DIRECTORY] [--swaps] [--effort N] [--jobs N]
                                  [--out FILE]

A situation (``tests/situations``) is held against an oracle that is not ours: bytes as a preloaded counter of the
allocator's calls sees them, bits as eager gives them, planned calls and captures as expected. NAME is a group or a part
of a situation's name. Results of a run of some situations replace their rows; the others' stay.

With ``--effort`` searches for plans are as short as that, which is for tests: bytes and bits hold for any plan.

With ``--swaps`` every plan gives way to another at its second call, as to one that was looked for beside training;
results go to ``promises-swaps.json``.

With ``--moving`` every model is fitted with that directory's disk as a tier, on which any tensor pays, so that the same
situations hold what moves; results go to ``promises-moving.json``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from harness.origin import cases_of_this_version
from harness.record import Record
from situations.oracle import SLACK_BYTES
from situations.registry import GROUPS, all_situations
from situations.run import EFFORT, MOVING, SWAPS
from situations.runner import counted, listed, named, run_all

SEEDS = {"weights and inputs": 0, "planners": 0}
NO_PEER = "Every situation is held against eager in the same process; no peer promises a budget."

OUT = Path(__file__).resolve().parent / "results" / "promises.json"


def main() -> int:
    options = _options()
    known = cases_of_this_version(options.out) if options.release else set[str]()
    wanted = [each for each in named(options.only) if each.name not in known]
    if options.list:
        for each in wanted:
            print(listed(each))
        print(f"{len(wanted)} situations")
        return 0
    settings = {"slack_bytes": SLACK_BYTES} | ({} if options.effort is None else {"effort": options.effort})
    record = Record("promises", {"counts": "Counts", "oracle": "The oracle", **GROUPS}, settings)
    before = (
        Record.read(options.out, record.titles) if options.out.exists() and (options.only or options.release) else None
    )
    run_all(record, wanted, options.jobs, lambda: _joined(before, record).write(options.out))
    record = _joined(before, record)
    record.write(options.out)
    print(f"\n{record.markdown()}")
    return 0 if record.passed else 1


def _joined(before: Record | None, record: Record) -> Record:
    """``record`` with what an earlier run knows of other situations, and the counts."""
    joined = Record(record.name, record.titles, record.settings, record.machine)
    if before is not None:
        joined.take(before)
    joined.take(record)
    names = {*all_situations(), "counter"}
    joined.rows = [row for row in joined.rows if row.question != "counts" and row.columns["case"] in names]
    joined.failures = [each for each in joined.failures if each["case"] in names]
    joined.rows += counted([row for row in joined.rows if row.question in GROUPS])
    return joined


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="groups or parts of situations' names")
    parser.add_argument("--release", action="store_true", help="run what was not made with this version")
    parser.add_argument("--list", action="store_true", help="print the situations and run nothing")
    parser.add_argument("--moving", type=Path, default=None, metavar="DIRECTORY", help="let tensors move there")
    parser.add_argument("--swaps", action="store_true", help="let every plan give way to another")
    parser.add_argument("--effort", type=int, default=None, metavar="N", help="moves of a search (default: a user's)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (default: 1)")
    parser.add_argument("--out", type=Path, default=None, help="result file (default: results/promises.json)")
    options = parser.parse_args()
    moving = options.moving is not None
    if moving:
        os.environ[MOVING] = str(options.moving.absolute())
    if options.swaps:
        os.environ[SWAPS] = "1"
    if options.effort is not None:
        os.environ[EFFORT] = str(options.effort)
    kind = "-moving" * moving + "-swaps" * options.swaps
    options.out = options.out or OUT.with_name(f"promises{kind}.json")
    return options


if __name__ == "__main__":
    sys.exit(main())

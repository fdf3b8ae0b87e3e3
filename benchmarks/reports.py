"""Do loops of public reports train as in eager, and what does it cost that every step is judged?

    python benchmarks/reports.py [--only NAME ...] [--effort N] [--jobs N] [--out FILE]

Each kind of failure that was found in people's loops is a situation with siblings (``tests/situations/reports.py``):
bits against eager, bytes of every step as a counter of allocations sees them, and where a step is refused, what the
refusal advises. The cost of judging is measured on the models of ``path.py``. NAME is ``judging``, ``reports`` or a
part of a situation's name; what is run again replaces its rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from harness.children import emit, run_child
from harness.origin import cases_of_this_version
from harness.record import Record, table
from questions import judging
from situations.oracle import SLACK_BYTES
from situations.registry import GROUPS
from situations.run import EFFORT
from situations.runner import named, run_all

SEEDS = {"weights and inputs": 0, "planners": 0}
NO_PEER = "Every situation is held against eager in the same process, and judged steps against unjudged ones."

GROUP = "reports"
OUT = Path(__file__).resolve().parent / "results" / "reports.json"
QUESTIONS = (GROUP, *judging.CASES)
TITLES = {"oracle": "The oracle", GROUP: GROUPS[GROUP], "judging": judging.TITLE}
MOST_SECONDS = 900.0


def main() -> int:
    options = _options()
    if options.child:
        emit(judging.rows(options.child))
        return 0
    if options.effort is not None:
        os.environ[EFFORT] = str(options.effort)
    record = Record(
        "reports", TITLES, {"slack_bytes": SLACK_BYTES} | ({"effort": options.effort} if options.effort else {})
    )
    before = Record.read(options.out, TITLES) if options.out.exists() and (options.only or options.release) else None
    known = cases_of_this_version(options.out) if options.release else set[str]()

    def joined() -> Record:
        found = Record(record.name, TITLES, record.settings, record.machine)
        if before is not None:
            found.take(before)
        found.take(record)
        return found

    wanted = [each for each in named([GROUP]) if each.name not in known and _is_named(each.name, GROUP, options.only)]
    if wanted:
        run_all(record, wanted, options.jobs, lambda: joined().write(options.out))
    for case in judging.CASES:
        if case not in known and _is_named(case, "judging", options.only):
            _judge(record, case)
            joined().write(options.out)
    print(f"\n{joined().markdown()}")
    return 0 if joined().passed else 1


def _is_named(name: str, question: str, only: list[str]) -> bool:
    return not only or question in only or any(word in name for word in only if word not in TITLES)


def _judge(record: Record, case: str) -> None:
    """The cost of judging, in a process of its own."""
    with tempfile.TemporaryDirectory() as caches:
        before = len(record.rows)
        environment = {"XDG_CACHE_HOME": caches, "OMP_NUM_THREADS": "1"}
        error = run_child([__file__, "--child", case], record.rows.append, environment, MOST_SECONDS)
    if error is not None:
        record.failures.append({"case": case, "error": error})
    print(table(record.rows[before:]) if error is None else f"{case} FAILED: {error}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="judging, reports, or parts of names")
    parser.add_argument("--release", action="store_true", help="run what was not made with this version")
    parser.add_argument("--effort", type=int, default=None, metavar="N", help="moves of a search (default: a user's)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (default: 1)")
    parser.add_argument("--out", type=Path, default=OUT, help="result file (default: results/reports.json)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

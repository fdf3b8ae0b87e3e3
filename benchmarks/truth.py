"""Are predicted seconds true? Overheads predicted from ops timed alone against whole steps, and a plan made twice.

    python benchmarks/truth.py [--quick] [--only NAME ...] [--resume] [--out benchmarks/results/truth.json]

NAME is a question (overhead, twice) or part of ``question:case``. Every model runs in a process of its own per number
of threads, eager, keep-all and four plans in turns; results are written after each.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from questions import overhead, twice

SEEDS = {"weights and inputs": 0, "order within a round": 0, "planners": 0}
NO_PEER = "It holds predictions of ours against steps of ours; eager's time stands beside them."

QUESTIONS: dict[str, ModuleType] = {"overhead": overhead, "twice": twice}
MOST_SECONDS = 900.0
"""For one case; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

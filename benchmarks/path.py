"""Does the whole path keep its promises? Bits, bytes, time and planning of recompute plans, each with its target.

    python benchmarks/path.py [--quick] [--only NAME ...] [--out benchmarks/results/path.json]

NAME is a question (bits, frontier, executor, bound, planning, hard_limit) or part of ``question:case``.
Every case runs in a process of its own; results are written after each, with a rendering in Markdown beside them.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from questions import bits, bound, executor, frontier, hard_limit, planning

SEEDS = {"weights and inputs": 0, "planners": 0}

QUESTIONS: dict[str, ModuleType] = {
    "bits": bits,
    "frontier": frontier,
    "executor": executor,
    "bound": bound,
    "planning": planning,
    "hard_limit": hard_limit,
}
MOST_SECONDS = 900.0
"""For one case; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

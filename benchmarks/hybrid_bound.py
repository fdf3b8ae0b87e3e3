"""Does the bound for plans that move buffers hold, and how near is it to the optimum?

    python benchmarks/hybrid_bound.py [--quick] [--only NAME ...] [--resume] [--out FILE]

NAME is a question (lane_violations, lane_gap) or part of ``question:case``. Every case runs in a process of its own.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from questions import lane_gap, lane_violations

SEEDS = {"random programs": "their number", "planners": 0}
NO_PEER = (
    "A bound is held against the optimum of small programs, found by trying all; nobody else has published a "
    "bound for plans that move and recompute."
)

QUESTIONS: dict[str, ModuleType] = {"lane_violations": lane_violations, "lane_gap": lane_gap}
MOST_SECONDS = 3600.0
"""For one case; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

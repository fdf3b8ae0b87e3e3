"""What does a step in several pieces cost against one graph?

    python benchmarks/pieces.py [--quick] [--only NAME ...] [--resume] [--out benchmarks/results/pieces.json]

NAME is a question (stitched, broken) or part of ``question:case``. Results are written after each case.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from questions import broken, stitched

NO_PEER = "The same step as one graph, by the same planner, is what it is held against; no peer plans over several."
SEEDS = {"weights and inputs": 0, "planners": 0}

QUESTIONS: dict[str, ModuleType] = {"stitched": stitched, "broken": broken}
MOST_SECONDS = 900.0
"""For one case; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

"""Are the planners right, and how far does each reach?

    python benchmarks/planners.py [--quick] [--only NAME ...] [--resume] [--out benchmarks/results/planners.json]

NAME is a question (oracle, best, unit_chain, reach) or part of ``question:case``. Every case runs in a process of its
own.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from questions import best, oracle, reach, unit_chain

SEEDS = {"random programs": "their number", "planners": 0}

QUESTIONS: dict[str, ModuleType] = {"oracle": oracle, "best": best, "unit_chain": unit_chain, "reach": reach}
MOST_SECONDS = 5400.0
"""For one case; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

"""Is the default plan ever slower than that of a published planner or of a baseline?

    python benchmarks/published.py [--quick] [--only MODEL ...] [--resume] [--out benchmarks/results/published.json]

Every model runs in a process of its own. Nothing of the models runs: programs are captured under fake tensors, costs
are by roofline for a machine of the catalogue.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from questions import never_worse

SEEDS = {"planners": 0}

QUESTIONS: dict[str, ModuleType] = {"never_worse": never_worse}
MOST_SECONDS = 3600.0
"""For one model; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

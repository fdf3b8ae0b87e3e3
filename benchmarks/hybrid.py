"""What does moving buffers give besides recomputing them?

    python benchmarks/hybrid.py [--quick] [--only NAME ...] [--resume] [--out benchmarks/results/hybrid.json]

NAME is a question (plan, grid, time, disk, margin) or part of ``question:case``. Every case runs in a process of its
own. ``disk`` runs steps on this machine. The others need no card: models are captured from shapes, costs and links are
those of the catalogue.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from questions import hybrid_grid, hybrid_margin, hybrid_plan, hybrid_time, through_disk

SEEDS = {"weights and inputs": 0, "planners": 0}

QUESTIONS: dict[str, ModuleType] = {
    "plan": hybrid_plan,
    "grid": hybrid_grid,
    "time": hybrid_time,
    "disk": through_disk,
    "margin": hybrid_margin,
}
MOST_SECONDS = 1800.0
"""For one case; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

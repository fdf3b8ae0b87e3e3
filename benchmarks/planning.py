"""Is the default plan near-optimal, and how soon is it there?

    python benchmarks/planning.py [--quick] [--only NAME ...] [--graphs DIR] [--out benchmarks/results/planning.json]

NAME is a question (QUESTIONS below) or part of ``question:case``. Every case runs in a process of its own.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.graphs import take_graphs_option
from harness.suite import main
from questions import buckets, fastsa, gap, graphs, llama, near_floor, revolve, scaling, small, warm

SEEDS = {"weights and inputs": 0, "order of lengths": 0, "small programs": "their number", "planners": 0}

QUESTIONS: dict[str, ModuleType] = {
    "gap": gap,
    "near_floor": near_floor,
    "small": small,
    "graphs": graphs,
    "fastsa": fastsa,
    "revolve": revolve,
    "scaling": scaling,
    "warm": warm,
    "buckets": buckets,
    "llama": llama,
}
MOST_SECONDS = 1800.0
"""For one case; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    take_graphs_option()
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

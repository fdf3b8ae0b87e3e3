"""The planners on the graphs, tables and counting of the Checkmate paper and of those that followed it.

    python benchmarks/checkmate.py --graphs DIR [--quick] [--only NAME ...] [--out benchmarks/results/checkmate.json]

NAME is a question (published, ratios, max_batch) or part of ``question:case``. DIR holds the published graphs
(github.com/haoming-codes/moccasin, folder data); without it, what needs them is skipped, and ``ratios`` runs on the
same networks rebuilt with FLOP costs. Every case runs in a process of its own.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.graphs import take_graphs_option
from harness.suite import main
from questions import max_batch, published, ratios

SEEDS = {"planners": 0}

QUESTIONS: dict[str, ModuleType] = {"max_batch": max_batch, "published": published, "ratios": ratios}
MOST_SECONDS = 3600.0
"""For one case; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    take_graphs_option()
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

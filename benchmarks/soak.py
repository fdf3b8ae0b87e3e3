"""Does training hold out? Memory over thousands of steps, interrupts, errors, threads, processes, kills, full disks.

    python benchmarks/soak.py [--quick] [--only NAME ...] [--out benchmarks/results/soak.json]

NAME is a question of ``questions/soak.py`` or part of ``soak:case``. Every case runs in a process of its own.
"""

from __future__ import annotations

import sys

from harness.suite import main
from questions import soak

SEEDS = {"weights and inputs": 0, "kinds and moments of what is done": 0, "planners": 0}
NO_PEER = "What is asked is whether anything of ours leaks or breaks; eager runs beside it as the reference."

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), {"soak": soak}, most_seconds=3000.0))

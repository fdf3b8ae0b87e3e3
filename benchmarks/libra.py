"""Libra's table: largest batches at 16 GB, time at equal budget, what each step gives, and steps that really run.

    python benchmarks/libra.py [--quick] [--only NAME ...] [--resume] [--out benchmarks/results/libra.json]

NAME is a question (batch, time, steps, transfer, real) or part of ``question:case``. Every case runs in a process of
its own. ``real`` runs steps on this machine, through its disk; of the others nothing runs: programs are captured under
fake tensors, costs are by roofline for a machine of the catalogue.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from questions import libra_batch, libra_real, libra_steps, libra_time, libra_transfer

SEEDS = {"weights and inputs": 0, "planners": 0}

QUESTIONS: dict[str, ModuleType] = {
    "batch": libra_batch,
    "time": libra_time,
    "steps": libra_steps,
    "transfer": libra_transfer,
    "real": libra_real,
}
MOST_SECONDS = 3600.0
"""For one case; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

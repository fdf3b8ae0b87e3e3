"""Does ``echo`` decide as Echo's own tests have it, and does ``auto`` reach the footprints of Echo's paper?

    python benchmarks/echo.py [--quick] [--only NAME ...] [--resume] [--out benchmarks/results/echo.json]

NAME is a question (decisions, against, sockeye, networks, stored, attention, real) or part of ``question:case``. Every
case runs in a process of its own. Nothing of the models runs, except in ``real``: programs are captured under fake
tensors, costs are by roofline for a machine of the catalogue.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from questions import (
    echo_against,
    echo_attention,
    echo_decisions,
    echo_networks,
    echo_real,
    echo_sockeye,
    echo_stored,
)

SEEDS = {"weights and inputs": 0, "planners": 0}

QUESTIONS: dict[str, ModuleType] = {
    "decisions": echo_decisions,
    "against": echo_against,
    "sockeye": echo_sockeye,
    "networks": echo_networks,
    "stored": echo_stored,
    "attention": echo_attention,
    "real": echo_real,
}
MOST_SECONDS = 3600.0
"""For one case; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

"""The tables of Meng et al. (swap-out/in for TensorFlow, NIPS 2017 workshop): theirs, the planners after them, ours.

    python benchmarks/swap_tf.py [--quick] [--only NAME ...] [--resume] [--out benchmarks/results/swap_tf.json]

NAME is a question (m1, m2, m3, m4, real) or part of ``question:case``. Every case runs in a process of its own. Nothing
of the models runs but in ``real``: programs are captured under fake tensors, seconds are predicted by roofline for the
Tesla M40 of the catalogue.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from questions import swap_m1, swap_m2, swap_m3, swap_m4, swap_real

SEEDS = {"weights and inputs": 0, "planners": 0}

QUESTIONS: dict[str, ModuleType] = {"m1": swap_m1, "m2": swap_m2, "m3": swap_m3, "m4": swap_m4, "real": swap_real}
MOST_SECONDS = 7200.0
"""For one case; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

"""Does every kind of model keep its bits and its budget? The zoo, 200 random models, PyTorch's known failures.

    python benchmarks/models.py [--quick] [--only NAME ...] [--out benchmarks/results/models.json]

NAME is a question (zoo, random, known, keep_all) or part of ``question:case``. Every case runs in a process of its
own; results are written after each, with a rendering in Markdown beside them.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from questions import keep_all, known_failures, random_cases, zoo

SEEDS = {"weights and inputs": 0, "steps of known failures": 7, "random models": "0 to 199", "planners": 0}
NO_PEER = (
    "It asks for bits and bytes, and eager gives both; what PyTorch's own means do to the same kinds of models "
    "is in `peers` and `public_suite`."
)

QUESTIONS: dict[str, ModuleType] = {
    "zoo": zoo,
    "known": known_failures,
    "keep_all": keep_all,
    "random": random_cases,
}
MOST_SECONDS = 1200.0
"""For one case; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

"""How far below the floor of the captured step do rewrites get, with the same bits, and what does it cost?

    python benchmarks/floors.py [--quick] [--only NAME ...] [--resume] [--out benchmarks/results/floors.json]

NAME is a question (gpt2, sizes, cards, rules, pins, inside, attention) or part of ``question:case``. Every case runs in
a process of its own. ``cards`` needs no card: models are captured from shapes, costs are those of the catalogue.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from questions import (
    floors_attention,
    floors_cards,
    floors_gpt2,
    floors_inside,
    floors_pins,
    floors_rules,
    floors_sizes,
)

SEEDS = {"weights and inputs": 0, "sizes": "their case", "planners": 0}

QUESTIONS: dict[str, ModuleType] = {
    "gpt2": floors_gpt2,
    "sizes": floors_sizes,
    "cards": floors_cards,
    "rules": floors_rules,
    "pins": floors_pins,
    "inside": floors_inside,
    "attention": floors_attention,
}
MOST_SECONDS = 7200.0
"""For one case; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

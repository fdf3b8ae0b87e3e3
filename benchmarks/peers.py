"""At the peaks that PyTorch's own means reach, who is faster? And who comes lower?

    python benchmarks/peers.py [--quick] [--only MODEL ...] [--resume] [--out benchmarks/results/peers.json]

Eager, ``torch.utils.checkpoint`` per block, selective policies, ``activation_memory_budget`` (op by op and through
Inductor), ``save_on_cpu``, Inductor's own reordering, the published planners and Ebbtide train the same model in one
process, in turns. Every model runs in a process of its own. Inductor needs a C++ compiler; where there is none, its
rows say so.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from questions import peer_frontier

SEEDS = {"weights and inputs": 0, "step": 1, "order of turns": "number of the round", "planners": 0}

QUESTIONS: dict[str, ModuleType] = {"frontier": peer_frontier}
MOST_SECONDS = 7200.0
"""For one model; a child that takes longer is ended and reported."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

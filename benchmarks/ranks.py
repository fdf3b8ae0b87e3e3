"""Does any rank of a DistributedDataParallel hang by our doing, and what does it cost that ranks agree?

    python benchmarks/ranks.py [--quick] [--only NAME ...] [--out benchmarks/results/ranks.json]

What may leave ranks waiting for one another is a list (``tests/rank_cases/hazards.py``), tried over gloo with 2 and 4
ranks in each mode of the wrapper: an error by name on every rank, or a training with the bits of the wrapper without
Ebbtide.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from harness.suite import main
from questions import agreement, hazards

SEEDS = {"weights and inputs": 0, "planners": 0}
NO_PEER = "What is asked is whether ranks hang; the same wrapper without Ebbtide is the reference for bits."

QUESTIONS: dict[str, ModuleType] = {"hazards": hazards, "agreement": agreement}

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, most_seconds=2400.0))

"""Are models of public libraries captured, with eager's bits and within their budget? What do PyTorch's means give?

    python benchmarks/public_suite.py [--quick] [--only NAME ...] [--resume] [--out FILE]

NAME is a question (hugging_face, diffusion, torchvision, timm) or part of ``question:case``. Every model runs in a
process of its own. The last three questions need `make suite-vision`, which sets an environment of their own up, runs
them there and adds them to the result; elsewhere they are left out, and that is said.
"""

from __future__ import annotations

import sys
from types import ModuleType

from harness.suite import main
from suite import diffusion, hugging_face, timm_models, torchvision_models

SEEDS = {"weights and inputs": 0, "step": 1, "planners": 0}

QUESTIONS: dict[str, ModuleType] = {
    "hugging_face": hugging_face,
    "diffusion": diffusion,
    "torchvision": torchvision_models,
    "timm": timm_models,
}
MOST_SECONDS = 2400.0
"""For one model by the wall; of CPU time it may take ``suite.judge.MOST_SECONDS``."""

if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS))

"""Echo's kinds of network run for real on this machine, small: same bits, within budget, as predicted.

Models are those of ``sockeye`` and ``networks`` at small sizes, costs measured here. Budgets are in the middle of the
range between the smallest workable peak and the unplanned one, and 1.02 times the smallest (``harness/verified.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ebbtide import Case
from ebbtide_published.zoo.small import SMALL
from harness.record import Row
from harness.sockeye import CONFIGS, scaled_down
from harness.verified import grid_rows
from questions.zoo import CAUSES as CAUSES_OF_THE_ZOO
from questions.zoo import RECURRENT

TITLE = "Echo's kinds of network run at small size on this CPU: bits, budget, predicted beside measured"
MODELS: dict[str, Callable[[], Case]] = {
    **{name: partial(scaled_down, name) for name in CONFIGS},
    **{name: SMALL[name] for name in ("deepspeech2", "transformer_base")},
}
CASES = tuple(MODELS)
QUICK = ("tbd",)
SHARES = (0.5,)
EFFORT = 1000  # local-search moves
CAUSES = {**dict.fromkeys(CONFIGS, RECURRENT), **CAUSES_OF_THE_ZOO}


def rows(name: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield from grid_rows("real", name, MODELS[name](), shares=SHARES, effort=EFFORT, causes=CAUSES)

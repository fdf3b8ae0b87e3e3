"""How good the plans are: the proven bound against the overhead found."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness import path_models as peers
from harness.grid import captured
from harness.record import Row, at_least

TITLE = "Plan quality: proven bound over overhead found"
CASES = ("gpt-12L-d512-v4096",)
QUICK = ()
SHARES = (0.6, 0.4, 0.2)
TARGET_SHARE, LEAST = 0.4, 0.80


def rows(name: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    known = captured(peers.build(name))
    for share in SHARES:
        plan = known.plan(known.grid_bytes(share))
        ratio = 1.0 if plan.overhead <= 0 else (plan.bound or 0.0) / plan.overhead
        yield Row(
            "bound",
            {
                "case": name,
                "budget": f"{share:.0%}",
                "of_unplanned": plan.timeline.above_bytes / known.unplanned_above_bytes,
                "overhead": plan.overhead,
                "bound": plan.bound,
                "bound_class": plan.bound_class,
                "bound_over_overhead": ratio,
                "status": plan.status.name,
                "plan_seconds": plan.plan_seconds,
            },
            (at_least("bound over overhead", ratio, LEAST),) if share == TARGET_SHARE else (),
        )

"""A plan made at one batch applied to others: does it hold the budget, and at what overhead?

1. Ops are the same at every batch, so a schedule of one is a schedule of all. It *holds* at another batch if it is
   legal there and within the budget; bytes grow with the batch: at a larger one a plan has only what it left free.
2. Plans are made at :data:`AT` times keep-all's largest batch; *replanned* is a plan made at the other batch itself,
   within the same budget.
3. A plan made for the largest of these batches holds at all smaller ones; ``from the largest`` is its overhead there.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.batched import Batched, Planned, judged, planned
from harness.record import Row, holds
from questions.libra_models import BUDGET, MACHINE, MODELS, PLANNERS, batched, tiers_of

TITLE = "A plan made at one batch applied to 0.8 to 1.2 times that batch: predicted overheads in percent, 16.9 GB"
CASES = tuple(MODELS)
QUICK = ("llama_small",)
AT = {"resnet50": 2.0, "resnet152": 2.0, "gpt2_small": 1.4, "llama_small": 2.0}
"""Times keep-all's largest batch; GPT-2's logits forbid twice."""
FACTORS = (0.8, 0.9, 1.0, 1.1, 1.2)
METHODS = ("libra", "libra:overlap=true", "auto")


def rows(case: str, quick: bool) -> Iterator[Row]:
    model = batched(case)
    made_at = round(AT[case] * model.unplanned(BUDGET, MODELS[case][1][0]))
    for method in METHODS:
        plan, widest = _planned(model, made_at, method), _planned(model, round(FACTORS[-1] * made_at), method)
        for factor in FACTORS[:2] if quick else FACTORS:
            batch = round(factor * made_at)
            again = _planned(model, batch, method)
            applied, from_widest = _applied(model, batch, plan), _applied(model, batch, widest)
            columns = {
                "case": case,
                "method": method,
                "made_at": made_at,
                "batch": batch,
                "times": factor,
                "holds": applied is not None and applied.overhead is not None,
                "of_budget": None if applied is None else applied.peak_bytes / BUDGET,
                "overhead": _percent(applied),
                "replanned": _percent(again),
                "from_the_largest": _percent(from_widest),
            }
            smaller = applied is not None and applied.overhead is not None
            checks = (holds("holds at this batch", smaller),) if factor <= 1.0 and plan.overhead is not None else ()
            yield Row("transfer", columns, checks)


def _planned(model: Batched, batch: int, method: str) -> Planned:
    return planned(model.at(batch), BUDGET, PLANNERS[method], MACHINE, tiers=tiers_of(method))


def _applied(model: Batched, batch: int, plan: Planned) -> Planned | None:
    """A plan's schedule on the step of another batch; the peak includes what is resident."""
    if plan.answer.schedule is None:
        return None
    step = model.at(batch)
    links = {tier: MACHINE.links[tier] for tier in ("host",)}
    found = judged(step.program, BUDGET - step.resident_bytes, plan.answer, MACHINE, links)
    return Planned(found.answer, found.overhead, found.seconds, found.peak_bytes + step.resident_bytes, 0.0)


def _percent(plan: Planned | None) -> float | None:
    return None if plan is None or plan.overhead is None else 100 * plan.overhead

"""What does writing results over what dies do by itself: smallest budget, overhead, bits, bytes; heads are left whole.

Each model of the zoo is planned as it was captured, and rewritten in both ways of the rule. f-budgets are those of the
captured step: its smallest peak above the start plus f of what its unplanned one is above that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

import ebbtide
from ebbtide._api.estimate import capture_program
from ebbtide._api.verify import Verifier
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning.alternatives import Costed
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.rewrites.choices import Choice
from ebbtide.rewrites.in_place.rule import InPlaceRule
from ebbtide.step.program import Program
from ebbtide.step.rewrite import Rewritten
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.units import Budget
from ebbtide_published.zoo.small import SMALL
from ebbtide_published.zoo.transformer import TransformerConfig, transformer_base
from harness.record import Row, at_most, holds

TITLE = "Zoo at small size: results written over what dies against the captured step"
CASES = (
    "gpt",
    "hf_gpt2",
    "hf_bert",
    "llama_70b_lora",
    "transformer_base",
    "many words",
    "dcgan",
    "unet",
    "segnet",
    "resnet50",
    "mobilenet",
    "vgg16",
    "fcn8",
)
QUICK = ("dcgan",)
MADE: dict[str, Callable[[], ebbtide.Case]] = {
    **SMALL,
    "many words": partial(
        transformer_base,
        4,
        length=64,
        config=TransformerConfig(vocabulary=8192, layers=3, width=128, hidden=256, heads=4),
    ),
}
"""The last is a transformer with smoothed labels over 8192 words; its head is not made in slices here."""
F = (0.5, 0.1)
EFFORT = 300  # local-search moves: what is asked here is what the rule changes, not the quality of plans
MOST_ADDED = 0.05
"""Overhead by which the better way may be slower than the captured step: costs of its ops are measured anew."""


def rows(case: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = MADE[case]()
    step, program, _ = capture_program(made.model, made.args, dict(made.kwargs))
    ways = [Choice(step, way).costed("cpu", program) for way in InPlaceRule().candidates(step)]
    costed = {each.rewrites[0].form: each for each in ways if each is not None}
    smallest, unplanned = smallest_of(program)[0], unplanned_bytes(program)
    least = {form: smallest_of(each.program)[0] for form, each in costed.items()}
    lowest = {form: unplanned_bytes(each.program) for form, each in costed.items()}
    yield Row(
        "rules",
        {
            "case": case,
            "places": max(sum(each["places"] for each in way.rewrites) for way in costed.values()),
            "smallest, bytes above": smallest,
            **{f"smallest, {form}": value / smallest for form, value in least.items()},
            "unplanned, bytes above": unplanned,
            **{f"unplanned, {form}": value / unplanned for form, value in lowest.items()},
        },
        (at_most("smallest with the rule / without", min(least.values()) / smallest, 1.0),),
    )
    verifier = Verifier(made.model, made.args, made.kwargs)
    for f in F[:1] if quick else F:
        budget = int(smallest + f * (unplanned - smallest))
        yield _within(case, f, budget, program, list(costed.values()), verifier)


def _within(case: str, f: float, budget: int, program: Program, ways: list[Costed], verifier: Verifier) -> Row:
    captured = _plan(program, budget, None)
    plans = [
        _plan(each.program, budget, Rewritten(each.rewrites, program.seconds, unplanned_bytes(program)))
        for each in ways
        if smallest_of(each.program)[0] <= budget
    ]
    best = min(plans, key=lambda plan: plan.overhead)
    assert best.rewritten is not None
    found = verifier.check(best)
    columns = {
        "case": case,
        "f": f,
        "way": best.rewritten.rewrites[0].form,
        "overhead, captured": captured.overhead,
        "overhead, rule": best.overhead,
        "measured / predicted": found.measured_above_bytes / found.predicted_above_bytes,
    }
    checks = (
        holds("bits of the captured step", not found.differences),
        at_most("measured / predicted", columns["measured / predicted"], 1.001),
        at_most("overhead with the rule - without", best.overhead - captured.overhead, MOST_ADDED),
    )
    return Row("rules", columns, checks)


def _plan(program: Program, budget: int, rewritten: Rewritten | None) -> ebbtide.Plan:
    options = PlanningOptions(effort=EFFORT, rewritten=rewritten)
    return make_plan(program, Budget(bytes=budget), resident_bytes=0, options=options)

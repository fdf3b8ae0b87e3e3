"""What a plan that moves costs where ops are faster than it was told, or the link slower: the margin that it leaves.

A plan for a link of a *counted* share of its rate is simulated at the whole rate, with all ops' seconds multiplied by a
*pace*: 0.8 is a step whose ops take a fifth less than they did alone, as they do on a card that is never idle.
Overheads are of the step at that pace that keeps everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

import ebbtide
from ebbtide.capture.without_memory import without_memory
from ebbtide.case import Case
from ebbtide.report.plan import Plan
from ebbtide.step.machine import Machine, machine_named
from ebbtide.step.simulate import simulate
from ebbtide.transfers.links import COUNTED_ON
from ebbtide.units import Budget
from ebbtide.zoo import GPTConfig, gpt, hf_bert, resnet50
from harness.record import Check, Row, at_most

TITLE = "Plans with a host tier where ops are faster than foreseen: how much of the link they count on"


def _gpt() -> Case:
    case = gpt(12, GPTConfig(vocabulary=50_304, length=1024, layers=24, width=1024, heads=16, dropout=0.1))
    return Case(case.model.to(torch.bfloat16), case.args)


def _bert() -> Case:
    case = hf_bert(32, vocabulary=30_522, length=512, layers=12, width=768, heads=12)
    return Case(case.model.to(torch.bfloat16), case.args, case.kwargs)


CASES_BY_NAME: dict[str, tuple[Callable[[], Case], str]] = {
    "gpt2-medium h200-141gb": (_gpt, "h200-141gb"),
    "bert a100-80gb": (_bert, "a100-80gb"),
    "resnet50 h100-80gb": (lambda: resnet50(128, image=224), "h100-80gb"),
}
CASES = tuple(CASES_BY_NAME)
QUICK = CASES[:1]
SHARES = (1.0, 0.9, COUNTED_ON, 0.7)
PACES = (1.0, 0.95, 0.9, 0.85, 0.8)
BUDGET = 0.4
"""Of the unplanned peak."""
EFFORT = 2_000
MOST_PAID = 0.25
"""What the margin costs where ops take what they were told to, of what it saves where they take a tenth less."""


def rows(case: str, quick: bool) -> Iterator[Row]:
    make, name = CASES_BY_NAME[case]
    with without_memory():
        made = make()
    machine = machine_named(name)
    at_ease = _overheads(_planned(made, machine, 1.0), machine)
    for share in (1.0, COUNTED_ON) if quick else SHARES:
        plan = _planned(made, machine, share)
        found = _overheads(plan, machine)
        columns = {f"at pace {pace:g}": each for pace, each in zip(PACES, found, strict=True)}
        checks = checked(found, at_ease) if share == COUNTED_ON else ()
        yield Row(
            "margin",
            {"case": case, "counted": share, "planned_overhead": plan.overhead, **columns},
            checks,
        )


def checked(found: Sequence[float], at_ease: Sequence[float]) -> tuple[Check, ...]:
    """Of overheads at all paces, and those of a plan that counts on all of the link."""
    paid, saved = found[0] - at_ease[0], at_ease[PACES.index(0.9)] - found[PACES.index(0.9)]
    return (
        at_most("cost at pace 1 over what is saved at pace 0.9", paid / saved, MOST_PAID),
        at_most("at pace 0.8, of counting on all of the link", found[-1], at_ease[-1]),
    )


def _planned(case: Case, machine: Machine, share: float) -> Plan:
    link = machine.links["host"]
    rates = {each: share * getattr(link, each) for each in ("out_bytes_per_second", "in_bytes_per_second")}
    slower = replace(machine, links={"host": replace(link, **rates)})
    unplanned = ebbtide.plan(
        case.model,
        case.args,
        dict(case.kwargs),
        budget="1000%",
        machine=machine,
        options=ebbtide.Options(planner="keep_all"),
    )
    budget = Budget(bytes=int(BUDGET * unplanned.baseline_peak_bytes))
    return ebbtide.plan(
        case.model,
        case.args,
        dict(case.kwargs),
        budget=budget,
        machine=slower,
        options=ebbtide.Options(tiers="host", effort=EFFORT, progress=None),
    )


def _overheads(plan: Plan, machine: Machine) -> list[float]:
    found: list[float] = []
    for pace in PACES:
        ops = tuple(replace(each, seconds=pace * each.seconds) for each in plan.program.ops)
        timeline = simulate(replace(plan.program, ops=ops), plan.schedule, machine)
        found.append(float(timeline.end_seconds.max()) / (pace * plan.baseline_seconds) - 1)
    return found

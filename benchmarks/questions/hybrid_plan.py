"""Recompute only, move only, both: predicted overheads of large models on cards of the catalogue, and proven bounds.

The budget at f is ``1.02 * floor + f * (unplanned - 1.02 * floor)`` above the step's start, where floor is that of
plans that only recompute. One setting of the planner for all cells. ``target`` is the least overhead that is known for
a cell from an earlier experiment (``None``: none was found), or the cell's bound and a tenth of a point.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from torch._subclasses.fake_tensor import FakeTensorMode

from ebbtide import Case, Program
from ebbtide._api.estimate import capture_ahead
from ebbtide.options import Options
from ebbtide.planners.base import Problem
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.hybrid.portfolio import moves_alone
from ebbtide.planners.registry import planner_named
from ebbtide.step.legality import check
from ebbtide.step.machine import Machine, machine_named
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import overhead_of, simulate
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.zoo.gpt import GPTConfig, gpt
from ebbtide.zoo.resnet import resnet50
from harness.record import Row, at_most, holds

TITLE = "Plans with a host tier: recompute only, move only, both, and bounds"
MACHINES = ("v100-16gb", "a100-80gb", "h100-80gb")
SHARES = (0.6, 0.4, 0.2)
KNOWN: dict[str, tuple[float | None, ...]] = {
    "gpt-12L v100-16gb": (0.0000, 0.0038, 0.0083),
    "gpt-12L a100-80gb": (0.0000, 0.0000, 0.0309),
    "gpt-12L h100-80gb": (0.0124, 0.0049, 0.0121),
    "resnet50 v100-16gb": (0.0458, 0.0541, None),
    "resnet50 a100-80gb": (0.0197, 0.0381, 0.2243),
    "resnet50 h100-80gb": (0.0526, 0.0560, 0.1051),
}
"""Per case the overheads of the earlier experiment at each of :data:`SHARES`."""
CASES = tuple(KNOWN)
QUICK = ("gpt-12L a100-80gb",)
NEAR = 0.001  # a cell this near its bound meets its target
ROUNDING = 5e-5  # the known figures are hundredths of a percent


def built(model: str) -> Case:
    """The model, without memory."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        if model == "resnet50":
            return resnet50(64, image=224)
        return gpt(8, GPTConfig(vocabulary=50304, length=1024, width=768, heads=12, layers=12))


def _overhead(program: Program, schedule: Schedule | None, machine: Machine) -> float | None:
    return None if schedule is None else overhead_of(program, schedule, machine)


def rows(case: str, quick: bool) -> Iterator[Row]:
    model, name = case.split()
    machine = machine_named(name)
    captured = built(model)
    program = capture_ahead(
        captured.model, captured.args, captured.kwargs, name=model, options=Options(machine=machine)
    ).program
    floor, unplanned = 1.02 * floor_bytes(program)[0], unplanned_bytes(program)
    plan = planner_named("auto")
    warm = Problem(program, unplanned - 1, machine=machine, tiers=("host",), effort=100)
    plan(warm)  # what is compiled at first use takes seconds
    for share, known in zip(SHARES, KNOWN[case], strict=True):
        if quick and share != SHARES[0]:
            return
        both = Problem(program, int(floor + share * (unplanned - floor)), machine=machine, tiers=("host",))
        begin = time.process_time()
        alone = plan(replace(both, tiers=()))
        alone_seconds = time.process_time() - begin
        begin = time.process_time()
        answer = plan(both)
        seconds = time.process_time() - begin
        moved = moves_alone(both)
        recompute, move = _overhead(program, alone.schedule, machine), _overhead(program, moved, machine)
        hybrid = _overhead(program, answer.schedule, machine)
        checks = [holds("a plan was found", hybrid is not None)]
        columns = {
            "case": case,
            "f": share,
            "budget_bytes": both.above_budget_bytes,
            "recompute_overhead": recompute,
            "recompute_bound": alone.bound,
            "move_overhead": move,
            "hybrid_overhead": hybrid,
            "hybrid_bound": answer.bound,
            "known_overhead": known,
            "recompute_cpu_seconds": alone_seconds,
            "hybrid_cpu_seconds": seconds,
        }
        if hybrid is not None and answer.schedule is not None and answer.bound is not None:
            timeline = simulate(program, answer.schedule, machine)
            target = max(answer.bound + NEAR, float("inf") if known is None else known + ROUNDING)
            legal = not check(program, answer.schedule, both.above_budget_bytes, machine.links)
            checks += [
                holds("legal and within the budget", legal),
                at_most("hybrid", hybrid, min(target, 1e9)),
                at_most("hybrid, against recomputing alone", hybrid, 1e9 if recompute is None else recompute + 1e-9),
                at_most("hybrid, against moving alone", hybrid, 1e9 if move is None else move + 1e-9),
            ]
            columns |= {"hidden_share": timeline.hidden_share, "transfer_seconds": timeline.transfer_seconds}
        yield Row("plan", columns, tuple(checks))

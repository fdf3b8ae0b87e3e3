"""What every step with calls in slices is held against, whichever rule has put them there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn

import ebbtide
from ebbtide._api.verify import Verifier
from ebbtide.capture.joint import Captured
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.rewrites.choices import Choice
from ebbtide.rewrites.rule import Rule
from ebbtide.step.program import Program
from ebbtide.step.rewrite import Rewrite, Rewritten
from ebbtide.step.unplanned import unplanned_bytes, unplanned_schedule
from ebbtide.units import Budget


def assert_trains_as_eager_within(
    rule: Rule,
    made: Callable[[], nn.Module],
    x: torch.Tensor,
    budget: int,
    history: Callable[[nn.Module], list[torch.Tensor]],
) -> None:
    """A model of ``made`` has the bits of eager and keeps ``budget``, rewritten by ``rule``."""
    model = made()
    expected = history(copy.deepcopy(model))
    every = ebbtide.Options(rewrites="all", progress=None)
    ebbtide.plan(made(), (x,), budget=budget, options=every)  # finds out where there is room
    ebbtide.fit(model, budget, progress=None, options=ebbtide.Options(rewrites="all"))
    assert all(map(torch.equal, history(model), expected))
    plan, step = ebbtide.plan_of(model), ebbtide.step_of(model)
    assert plan is not None
    assert plan.rewritten is not None
    assert {each.rule for each in plan.rewritten.rewrites} == {rule.name}
    assert step is not None
    assert step.measured_above_bytes is not None
    assert plan.resident_bytes + step.measured_above_bytes <= budget


def assert_captured_bits_and_predicted_bytes(
    rule: Rule,
    model: nn.Module,
    x: torch.Tensor,
    captured: tuple[Captured, Program],
    candidates: Iterable[tuple[Rewrite, ...]],
    calls: int,
) -> None:
    """Each of ``candidates`` is proven, of so many ``calls``, and runs with the bits and within the bytes it tells."""
    step, program = captured
    verifier = Verifier(model, (x,), {})
    plain = make_plan(program, Budget.parse("200%"), resident_bytes=0, options=PlanningOptions(planner="keep_all"))
    for candidate in candidates:
        costed = Choice(step, candidate).costed("cpu", program)
        assert costed is not None
        assert len(rule.prove(step, rule.rewritten(step, candidate))) == calls
        rewritten = Rewritten(costed.rewrites, program.seconds, unplanned_bytes(program))
        plan = replace(
            plain, program=costed.program, schedule=unplanned_schedule(costed.program), rewritten=rewritten, floor_op=0
        )
        found = verifier.check(plan)
        assert found.differences == ()
        assert found.measured_above_bytes <= found.predicted_above_bytes * 1.001 + 64
        assert unplanned_bytes(costed.program) < unplanned_bytes(program)


def assert_estimated_workspace_is_the_measured_one(rule: Rule, captured: tuple[Captured, Program]) -> None:
    """Of each call in slices of each candidate."""
    step, program = captured
    for candidate in rule.candidates(step):
        choice = Choice(step, candidate)
        costed = choice.costed("cpu", program)
        assert costed is not None
        for ours, measured in zip(choice.estimated(program).ops, costed.program.ops, strict=True):
            if ours.name.endswith("_sliced"):
                assert measured.workspace_bytes <= 1.02 * ours.workspace_bytes
                assert ours.workspace_bytes <= 1.3 * measured.workspace_bytes

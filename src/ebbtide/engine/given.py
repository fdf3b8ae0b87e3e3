"""A plan that the user gave, held against the step at hand."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

from ebbtide.capture.joint import Captured
from ebbtide.cost.attach import is_measured_form
from ebbtide.errors import PlanMismatch
from ebbtide.report.plan import Plan
from ebbtide.rewrites.choices import Finish, choice_of, itself
from ebbtide.step.legality import check
from ebbtide.step.machine import is_elsewhere
from ebbtide.step.program import Program
from ebbtide.step.refused_budget import refused_budget
from ebbtide.step.schedule import Schedule
from ebbtide.units import format_count

__all__ = ["given_plan_here", "program_of", "start_here"]


def program_of(plan: Plan, captured: Captured, program: Program, device: str, finish: Finish = itself) -> Program:
    """What ``plan`` is for where it is of this step: ``program``, or what the plan's rewrites make of ``captured``.

    Raises:
        PlanMismatch: if the step has not what they replace, or the kernels here are not as they take for granted.
    """
    if plan.program.has_updates and not program.has_updates:
        raise PlanMismatch(
            f"the plan for {plan.case} has the optimizer in the step, and the model was fitted without; fit it with "
            'ebbtide.fit(model, plan, optimizer=optimizer, step="inside")',
            differences=['step: plan "inside", here "outside"'],
        )
    if plan.rewritten is None:
        return program
    try:
        choice = choice_of(captured, plan.rewritten.rewrites, finish)
    except LookupError as error:
        raise PlanMismatch(
            f"the plan for {plan.case} does not belong to this step: {error}", differences=[str(error)]
        ) from None
    if missing := choice.not_held(device):
        raise PlanMismatch(
            f"the plan for {plan.case} computes {missing} and takes for granted that this has the bits of the whole, "
            "which does not hold here, or which there is no room to find out; plan anew with fit(model, budget=...)",
            differences=[f"kernels: {missing}"],
        )
    return choice.captured.program


def given_plan_here(
    plan: Plan,
    program: Program,
    context: Mapping[str, str],
    resident: int,
    reserve: int,
    resident_parts: Mapping[str, int],
) -> Plan:
    """The user's plan, if it is of this program and fits.

    Args:
        plan: to run.
        program: of the step at hand.
        context: of the device at hand.
        resident: bytes at the step's start.
        reserve: bytes kept free for what the proof remembers.
        resident_parts: what is resident, bytes by kind.

    Raises:
        PlanMismatch: if it is of another program, machine or torch build.
        BudgetError: if more is resident than it has room for.
    """
    source = plan.provenance
    differences = [
        f"{key}: plan {theirs or None!r}, here {context[key]!r}"
        for key, theirs in (("device", source.device), ("torch", source.torch), ("name", source.name))
        if theirs != context.get(key, theirs)
    ]
    if is_elsewhere(plan.machine):
        differences.insert(0, f"machine: plan {source.machine!r}, here {context['device']!r}")
    if not is_measured_form(plan.program, program):
        differences.append(_program_difference(plan, program))
    if differences:
        raise PlanMismatch(
            f"the plan for {plan.case} does not belong to this step: {'; '.join(differences)}; "
            "ebbtide.fit(model, budget, options=ebbtide.Options(start=plan)) captures and prices the step here and "
            "starts the search from it",
            differences=differences,
        )
    moved = replace(plan, resident_bytes=resident, reserve_bytes=reserve)
    if moved.predicted_peak_bytes + reserve > plan.budget_bytes:
        moved_bytes = resident + reserve - plan.resident_bytes - plan.reserve_bytes
        raise refused_budget(
            "more is resident than when the given plan was made, which needs more than its budget so",
            remedy="plan anew with fit(model, budget=...)",
            budget_bytes=plan.budget_bytes,
            floor_bytes=plan.floor_bytes + moved_bytes,
            smallest_bytes=plan.smallest_bytes + moved_bytes,
            resident_bytes=resident,
            resident_parts=resident_parts,
            pinned_by=str(plan.program.ops[plan.floor_op]),
            needs=[("needed by the given plan here", moved.predicted_peak_bytes + reserve, "")],
            reserve_bytes=reserve,
        )
    return moved


def start_here(plan: Plan | None, program: Program) -> list[Schedule]:
    """The schedule of a plan to start from, if it is one of ``program`` as well; its budget does not matter."""
    if plan is None:
        return []
    try:
        violations = check(program, plan.schedule)
    except IndexError:  # of another program, with more ops or buffers
        violations = ["of another program"]
    if violations:
        warnings.warn(
            f"the plan for {plan.case} that was given to start from is of another step than the one captured here "
            f"({_program_difference(plan, program)}); the search starts without it",
            stacklevel=2,
        )
        return []
    return [plan.schedule]


def _program_difference(plan: Plan, ours: Program) -> str:
    theirs = plan.program
    if len(ours.ops) != len(theirs.ops):
        return f"program: the plan's has {format_count(len(theirs.ops), 'op')}, this one {len(ours.ops)}"
    for a, b in zip(ours.ops, theirs.ops, strict=True):
        if (a.target, a.views) != (b.target, b.views):
            return f"program: the plan's has {b.target}{b.views} where this one has {a.target}{a.views}"
        if a.signature != b.signature:
            return f"program: the plan's has {a.signature} where this one has {b.signature}"
    return "program: buffers differ in size"

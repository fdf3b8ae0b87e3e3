"""What a planner says where no plan is within a budget; the form is :mod:`~ebbtide.step.refused_budget`'s."""

from __future__ import annotations

from ebbtide.errors import BudgetError
from ebbtide.planners.base import AS_CAPTURED
from ebbtide.planning.asked import Asked, PlanningOptions
from ebbtide.planning.step_end import LOSS_TO_COME, budget_to_ask_for, share_of_unplanned
from ebbtide.step.machine import Machine, catalogue
from ebbtide.step.program import Program
from ebbtide.step.provenance import LossPlace
from ebbtide.step.refused_budget import refused_budget
from ebbtide.step.resident_in_words import OPTIMIZER_STATE, WEIGHTS
from ebbtide.units import format_allowed, format_bytes

__all__ = ["budget_error", "end_error"]

_NO_STATE = 'tiers="disk", options=ebbtide.Options(offload_optimizer=True) keeps no state'
_NO_GRADIENTS = 'step="inside" with optimizer= keeps no gradients'
_SMALL_NUMBER = 100
"""Bytes up to which a budget is rather meant as a share."""


def end_error(asked: Asked, program: Program) -> BudgetError:
    """The refusal of a budget that does not hold an end of the step, whatever the plan."""
    options = asked.options
    return asked.end.error(
        program,
        asked.resident_bytes,
        asked.budget_bytes(program),
        resident_parts=options.resident_parts,
        takes_shares=options.takes_shares,
        takes_inside=options.takes_inside,
        loss_unmeasured=_is_unmeasured(program, options),
    )


def budget_error(
    asked: Asked, program: Program, *, floor: tuple[int, int], smallest: int, unplanned: int, interrupted: bool
) -> BudgetError:
    """The refusal of a budget within which no plan was found.

    Args:
        asked: what was asked for.
        program: that was planned.
        floor: bytes of a proven floor, and the op that pins it.
        smallest: bytes for which a plan was found.
        unplanned: bytes of the peak that shares are of.
        interrupted: whether the search was.
    """
    options, budget, reserve = asked.options, asked.budget_bytes(program), asked.reserve_bytes
    floor_bytes, floor_op = floor
    pin = str(program.ops[floor_op]) if 0 <= floor_op < len(program.ops) else "what is resident"
    kept = ", which keeps what the model's checkpoints drop" if "checkpoints" in program.context else ""
    unmeasured = _is_unmeasured(program, options)
    if budget >= smallest:
        reason = f"planner {options.planner!r} found no schedule within the budget, which another one finds"
        remedy = "use planner='auto'"
    else:
        found = (
            "no plan within the budget was found"
            if floor_bytes < unplanned
            else "no plan takes less than the unplanned step"
        )
        reason = f"{found}{_if_a_share_is_meant(budget)}"
        remedy = (
            f"ask for {budget_to_ask_for(smallest, unplanned, takes_shares=options.takes_shares)}"
            + (LOSS_TO_COME if unmeasured else "")
            + f", or {_less_besides(program, budget, options, loss_outside=unmeasured)}"
            + ("" if options.machine is None else _machines_for(smallest, options.machine))
        )
    if interrupted:
        reason += ". The search was interrupted: a longer one may find a plan within less"
    return refused_budget(
        reason,
        remedy=remedy,
        budget_bytes=budget,
        floor_bytes=floor_bytes,
        smallest_bytes=smallest,
        resident_bytes=asked.resident_bytes,
        resident_parts=options.resident_parts,
        pinned_by=pin,
        needs=[
            ("smallest for which a plan was found", smallest, share_of_unplanned(smallest, unplanned, reserve) + kept),
            ("floor", floor_bytes, f"of plans with {AS_CAPTURED}{_moving_to(tuple(options.links))}: pinned by {pin}"),
        ],
        reserve_bytes=reserve,
    )


def _is_unmeasured(program: Program, options: PlanningOptions) -> bool:
    """Whether the loss is computed outside of the model, and what that takes is not known."""
    return options.provenance.loss is LossPlace.OUTSIDE and not program.between_bytes


def _machines_for(smallest: int, machine: Machine) -> str:
    """Which machines of the catalogue hold ``smallest`` bytes, where the one planned for is too small itself."""
    if not machine.memory_bytes or smallest <= machine.usable_bytes:
        return ""
    large = sorted((each.usable_bytes, name) for name, each in catalogue().items() if each.usable_bytes >= smallest)
    which = ", ".join(name for _, name in large)
    holding = f"of the catalogue, {which} would do" if large else "no machine of the catalogue has that much"
    room = f"{format_allowed(machine.memory_bytes)}, {format_allowed(machine.usable_bytes)} of it usable"
    return f". {machine.name} has {room}, which no plan that was found fits; {holding}"


def _moving_to(tiers: tuple[str, ...]) -> str:
    """What schedules may do besides recomputing."""
    return f", whatever they move to {' and '.join(tiers)}" if tiers else ""


def _less_besides(program: Program, budget: int, options: PlanningOptions, *, loss_outside: bool) -> str:
    """What else may help: not smaller inputs where weights, their gradients and an optimizer's state are too large."""
    made = sum(program.buffers[each].bytes for each in set(program.gradients))
    state = options.resident_parts.get(OPTIMIZER_STATE, 0)
    fixed = made + state + options.resident_parts.get(WEIGHTS, 0)
    if fixed <= budget:
        return ("return the loss from forward, or " if loss_outside else "") + "give the step smaller inputs"
    less = [_NO_GRADIENTS] * (bool(made) and options.takes_inside()) + [_NO_STATE] * bool(state)
    return (
        f"train fewer weights: weights, gradients and the optimizer's state take {format_bytes(fixed)} of any budget"
        + (f"; {', '.join(less)}" if less else "")
    )


def _if_a_share_is_meant(budget: int) -> str:
    return f" (a share is a text, '{budget}%')" if budget <= _SMALL_NUMBER else ""

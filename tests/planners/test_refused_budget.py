"""The whole text of a refused budget: what is too small, what to ask for, what is resident, and what pins the floor."""

from __future__ import annotations

import pytest

from ebbtide.errors import BudgetError
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.step.provenance import LossPlace, Provenance
from ebbtide.units import Budget
from strategies import chain

PROGRAM = chain(6, activation_bytes=1000, gradient_bytes=100)


def refusal(budget: int, *, resident: int = 0, reserve: int = 0, options: PlanningOptions | None = None) -> str:
    """What is said of a budget of so many bytes."""
    with pytest.raises(BudgetError) as raised:
        make_plan(
            PROGRAM,
            Budget(bytes=budget),
            resident_bytes=resident,
            reserve_bytes=reserve,
            options=options or PlanningOptions(),
        )
    return str(raised.value)


def test_smaller_inputs_help_where_the_fixed_part_fits() -> None:
    parts = {"weights": 3000, "optimizer state": 2000}
    assert refusal(6000, resident=5000, reserve=64, options=PlanningOptions(resident_parts=parts)) == (
        "a budget of 5.85 KiB (6000 bytes) is too small: the smallest for which a plan was found is 9.34 KiB "
        "(9564 bytes, 53.14 % of the unplanned peak). Ask for 9564 bytes or 53.14% or more (of a fitted model: "
        "ebbtide.set_budget), or give the step smaller inputs. 4.95 KiB (5064 bytes) of it are resident before the "
        "step starts, whatever the plan: 2.93 KiB (3000 bytes) weights, 1.96 KiB (2000 bytes) optimizer state, 64 B "
        "(64 bytes) kept in reserve. No schedule with PyTorch's op order and boundary stays below 9.34 KiB, which is "
        "pinned by gelu_backward0 (gelu_backward0)"
    )


def test_a_loss_outside_that_nobody_measured_comes_on_top() -> None:
    options = PlanningOptions(provenance=Provenance(loss=LossPlace.OUTSIDE), takes_shares=False)
    assert (
        "Ask for 9500 bytes or more, plus what the loss outside takes, which the first step measures, or return the "
        "loss from forward, or give the step smaller inputs. "
    ) in refusal(6000, resident=5000, options=options)


def test_fewer_weights_help_where_it_does_not() -> None:
    assert refusal(100) == (
        "a budget of 100 B (100 bytes) is too small (a share is a text, '100%'): the smallest for which a plan was "
        "found is 4.40 KiB (4500 bytes, 34.62 % of the unplanned peak). Ask for 4500 bytes or 34.62% or more (of a "
        "fitted model: ebbtide.set_budget), or train fewer weights: whatever the inputs, weights, gradients and the "
        'optimizer\'s state take 600 B; step="inside" keeps no gradients. Nothing of it is resident before the step '
        "starts. No schedule with PyTorch's op order and boundary stays below 4.40 KiB, which is pinned by "
        "gelu_backward0 (gelu_backward0)"
    )


def test_another_planner_helps_where_one_found_nothing() -> None:
    assert refusal(6000, options=PlanningOptions(planner="keep_all")) == (
        "planner 'keep_all' found no schedule within the budget of 5.85 KiB (6000 bytes); another one needs 4.40 KiB "
        "(4500 bytes): use planner='auto'"
    )

"""The whole text of a refused budget: what is too small, what to ask for, what is resident, and what pins the floor."""

from __future__ import annotations

import re

import pytest

from ebbtide.errors import BudgetError
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.planning.step_end import INSIDE, LOSS_TO_COME, NOTHING_AFTER, StepEnd
from ebbtide.step.provenance import LossPlace, Provenance
from ebbtide.units import Budget, format_bytes
from strategies import chain

PROGRAM = chain(6, activation_bytes=1000, gradient_bytes=100)


def refusal(
    budget: int,
    *,
    resident: int = 0,
    reserve: int = 0,
    options: PlanningOptions | None = None,
    end: StepEnd = NOTHING_AFTER,
) -> str:
    """What is said of a budget of so many bytes."""
    with pytest.raises(BudgetError) as raised:
        make_plan(
            PROGRAM,
            Budget(bytes=budget),
            resident_bytes=resident,
            reserve_bytes=reserve,
            end=end,
            options=options or PlanningOptions(),
        )
    return str(raised.value)


def lines(text: str) -> str:
    """The text without the spaces that put it in columns."""
    return re.sub(r" {2,}", " ", text).strip()


def test_smaller_inputs_help_where_the_fixed_part_fits() -> None:
    parts = {"weights": 3000, "optimizer state": 2000}
    text = refusal(6000, resident=5000, reserve=64, options=PlanningOptions(resident_parts=parts))
    assert text == (
        """\
Does not fit: ask for at least 9564 bytes (9.34 KiB) or 53.14% (of a fitted model: ebbtide.set_budget), or give the \
step smaller inputs.
Why: no plan within the budget was found.
  budget                               5.85 KiB  6000 bytes
  smallest for which a plan was found  9.34 KiB  9564 bytes  53.14 % of the unplanned peak
  floor                                9.34 KiB  9564 bytes  \
of plans with PyTorch's op order and boundary: pinned by gelu_backward0 (gelu_backward0)
  resident before the step             4.95 KiB  5064 bytes  whatever the plan
    weights                            2.93 KiB  3000 bytes
    optimizer state                    1.96 KiB  2000 bytes
    kept in reserve                        64 B    64 bytes"""
    )


def test_a_loss_outside_that_nobody_measured_comes_on_top() -> None:
    options = PlanningOptions(provenance=Provenance(loss=LossPlace.OUTSIDE), takes_shares=False)
    assert refusal(6000, resident=5000, options=options).startswith(
        "Does not fit: ask for at least 9500 bytes (9.28 KiB), plus what the loss outside takes, which the first step "
        "measures, or return the loss from forward, or give the step smaller inputs.\n"
    )


@pytest.mark.parametrize("outside", [True, False])
def test_what_takes_less_after_the_backward_is_advised_where_the_rest_has_room(outside: bool) -> None:
    end = StepEnd(
        3000, what="tensors of SGD", remedies=("make it otherwise", f"have it step in the backward ({INSIDE})")
    )
    needed = end.needed_bytes(PROGRAM, 5000)
    loss = LossPlace.OUTSIDE if outside else None
    options = PlanningOptions(provenance=Provenance(loss=loss), takes_shares=False)
    said = {budget: refusal(budget, resident=5000, end=end, options=options) for budget in (needed - 1, needed - 3001)}
    asked = f"Does not fit: ask for at least {needed} bytes ({format_bytes(needed)})"
    asked += f"{LOSS_TO_COME if outside else ''}, or "
    for budget, text in said.items():
        others = "make it otherwise, or " if budget >= needed - 3000 else ""
        assert text.startswith(f"{asked}{others}have it step in the backward")


@pytest.mark.parametrize("inside", [True, False])
def test_fewer_weights_help_where_it_does_not(inside: bool) -> None:
    text = refusal(100, options=PlanningOptions(takes_inside=lambda: inside))
    less = '; step="inside" with optimizer= keeps no gradients' if inside else ""
    assert lines(text).startswith(
        "Does not fit: ask for at least 4500 bytes (4.40 KiB) or 34.62% (of a fitted model: ebbtide.set_budget), or "
        f"train fewer weights: weights, gradients and the optimizer's state take 600 B of any budget{less}.\n"
        "Why: no plan within the budget was found (a share is a text, '100%').\n"
        " budget 100 B 100 bytes\n"
    )


def test_another_planner_helps_where_one_found_nothing() -> None:
    assert lines(refusal(6000, options=PlanningOptions(planner="keep_all"))).startswith(
        "Does not fit: use planner='auto'.\n"
        "Why: planner 'keep_all' found no schedule within the budget, which another one finds.\n"
        " budget 5.85 KiB 6000 bytes\n smallest for which a plan was found 4.40 KiB 4500 bytes"
    )

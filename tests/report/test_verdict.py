"""The verdict on a plan: does it fit, at what cost, and what next; never more than three lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.report.plan import Plan
from ebbtide.report.text import verdict
from ebbtide.report.text.verdict import verdict_of
from ebbtide.step.provenance import LossPlace
from ebbtide.step.unplanned import unplanned_schedule
from report.plans import LINKED, hybrid, recomputed


def as_it_is() -> Plan:
    plan = recomputed(6)
    return replace(plan, schedule=unplanned_schedule(plan.program), budget_bytes=2 * plan.baseline_peak_bytes)


def on(plan: Plan, usable_bytes: int) -> Plan:
    room = replace(plan.provenance, machine="linked", memory_bytes=2 * usable_bytes, usable_bytes=usable_bytes)
    return replace(plan, machine=LINKED, provenance=room)


def test_a_plan_fits_and_costs() -> None:
    plan = recomputed(6)
    fits, costs, *_ = verdict_of(plan)
    assert fits.startswith(f"{plan.case} fits with a plan: ")
    assert costs.startswith("it adds ")
    assert str(plan) == "\n".join(verdict_of(plan))


def test_what_needs_no_plan_fits_as_it_is() -> None:
    (fits, *rest) = verdict_of(as_it_is())
    assert "fits as it is" in fits
    assert fits.endswith("no time added")
    assert not any("adds" in each for each in rest)


def test_a_machine_that_is_smaller_than_the_peak_does_not_hold_it() -> None:
    plan = recomputed(6)
    small = on(plan, plan.predicted_peak_bytes - 1)
    assert "does not fit" in verdict_of(small)[0]
    least = replace(small, smallest_bytes=small.predicted_peak_bytes // 2)
    assert verdict_of(least)[-1].startswith("next: a budget of ")
    none = replace(small, smallest_bytes=small.predicted_peak_bytes)
    assert "a smaller batch or length" in verdict_of(none)[-1]
    assert "does not fit" not in verdict_of(on(plan, plan.predicted_peak_bytes))[0]


def test_a_dear_plan_is_told_of_the_tiers_that_it_has_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "_DEAR", 0.01)
    plan = replace(recomputed(6), machine=LINKED, tiers=())
    assert verdict_of(plan)[-1].startswith('next: tiers="host"')
    assert "moves tensors" not in "".join(verdict_of(replace(plan, tiers=("host",))))
    assert "moves tensors" not in "".join(verdict_of(recomputed(6)))


def test_less_is_said_to_be_possible_only_where_it_was_looked_for() -> None:
    plan = replace(as_it_is(), smallest_bytes=1)
    assert "down to 1 B" in verdict_of(plan)[-1]
    assert "down to" not in "".join(verdict_of(replace(plan, smallest_is_searched=False)))


def test_a_loss_outside_is_said_not_to_be_counted() -> None:
    plan = recomputed(6)
    outside = replace(plan, provenance=replace(plan.provenance, loss=LossPlace.OUTSIDE))
    assert "without the loss, which is outside the model" in verdict_of(outside)[0]


@pytest.mark.parametrize("plan", [recomputed(6), hybrid(6), as_it_is()], ids=["recomputed", "moved", "as it is"])
def test_it_takes_at_most_three_lines(plan: Plan) -> None:
    for each in (plan, on(plan, 1), on(plan, 2**40), replace(plan, bound=None), replace(plan, tiers=())):
        assert 1 <= len(verdict_of(each)) <= 3

"""A plan says whether its machine holds it, and a refusal which machine would."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

import ebbtide
from ebbtide._api.estimate import AheadStep, capture_ahead
from ebbtide.capture.without_memory import without_memory
from ebbtide.cost.cuda_workspace import cublas_bytes
from ebbtide.errors import BudgetError
from ebbtide.planning.pipeline import PlanningOptions
from ebbtide.report.plan import Plan
from ebbtide.report.text.plan import write_plan
from ebbtide.step.machine import Machine, catalogue, machine_named
from ebbtide.units import Budget
from ebbtide.zoo import GPTConfig, gpt


@pytest.fixture(scope="module")
def tiny() -> Machine:
    return replace(machine_named("t4-16gb"), memory_bytes=12 * 2**20, context_bytes=2 * 2**20, fragmentation=0.0)


@pytest.fixture(scope="module")
def step(tiny: Machine) -> AheadStep:
    with without_memory():
        case = gpt(2, GPTConfig(vocabulary=64, length=32, layers=1, width=32, heads=2))
    return capture_ahead(case.model, case.args, case.kwargs, options=ebbtide.Options(machine=tiny))


def text_of(plan: Plan) -> str:
    stream = io.StringIO()
    write_plan(plan, stream)
    return stream.getvalue()


def test_a_refusal_names_the_machines_that_would_do(step: AheadStep) -> None:
    with pytest.raises(BudgetError) as caught:
        step.plan(Budget.parse("10MiB"), PlanningOptions(effort=1))
    text = str(caught.value)
    assert (
        "t4-16gb has 12.00 MiB, 10.00 MiB of it usable, which no plan that was found fits; "
        "of the catalogue, m40-12gb, rtx3060-12gb, titanxp-12gb,"
    ) in text
    assert text.index("t4-16gb,") < text.index("a100-40gb") < text.index("h200-141gb")


def test_a_refusal_by_the_budget_alone_names_no_machine(step: AheadStep) -> None:
    roomy = replace(step, machine=machine_named("t4-16gb"))
    with pytest.raises(BudgetError) as caught:
        roomy.plan(Budget.parse("10MiB"), PlanningOptions(effort=1))
    assert "of it usable" not in str(caught.value)


def test_no_machine_of_the_catalogue_holds_it(step: AheadStep) -> None:
    largest = max(each.usable_bytes for each in catalogue().values())
    with pytest.raises(BudgetError, match="no machine of the catalogue has that much"):
        replace(step, resident_bytes=largest).plan(Budget.parse("10MiB"), PlanningOptions(effort=1))


def test_a_plan_larger_than_its_machine_says_so(step: AheadStep) -> None:
    plan = step.plan(Budget.parse("1GiB"), PlanningOptions(effort=1))
    text = text_of(plan)
    assert "t4-16gb has 12.00 MiB, 10.00 MiB usable: this does NOT fit it" in text
    assert "less 2.00 MiB for the device's context (estimate, " in text
    assert "and 0% of the rest for fragmentation (estimate: " in text
    room = replace(plan.provenance, usable_bytes=plan.predicted_peak_bytes + 2**20)
    assert "1.00 MiB more than the peak" in text_of(replace(plan, provenance=room))
    less = replace(plan.provenance, usable_bytes=plan.predicted_peak_bytes - 1)
    assert "this does NOT fit it" in text_of(replace(plan, provenance=less))


def test_cublas_is_resident_where_a_step_has_products(step: AheadStep, tiny: Machine) -> None:
    """Twice CUBLAS_WORKSPACE_CONFIG's default :4096:2:16:8 on a T4, :4096:8 on an H100."""
    assert cublas_bytes(step.program, tiny) == 2 * 1024 * (4096 * 2 + 16 * 8)
    assert cublas_bytes(step.program, machine_named("h100-80gb")) == 2 * 1024 * 4096 * 8
    without = replace(step.program, ops=tuple(replace(op, target="aten.relu.default") for op in step.program.ops))
    assert cublas_bytes(without, tiny) == 0
    parameters = step.resident_bytes - cublas_bytes(step.program, tiny)
    assert 0 < parameters < 2**20


def test_a_step_for_this_machine_holds_no_cublas() -> None:
    case = gpt(2, GPTConfig(vocabulary=64, length=32, layers=1, width=32, heads=2))
    here = ebbtide.plan(case.model, case.args, budget="1GiB", options=ebbtide.Options(effort=1))
    assert here.resident_bytes < 2**20
    assert not {"memory_bytes", "mapped", "workspace"} & set(here.provenance)

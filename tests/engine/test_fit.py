"""``fit`` refuses bad input before anything of the model runs, and says what would work."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import BudgetError, PlanMismatch, UsageError
from ebbtide.planners import Problem, Progress, planner_named
from ebbtide.planners.base import Answer
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning import one_program
from ebbtide.report.plan import Plan
from ebbtide.step.machine import machine_named
from ebbtide.step.provenance import Costs
from ebbtide.zoo import MLPChain, mlp_chain


class Tracked(nn.Module):
    """A chain whose every step draws and changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = MLPChain(layers=4, width=16, dropout=0.1)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1.0)
        return self.chain(x)


X = torch.linspace(-1.0, 1.0, 64 * 16).reshape(64, 16)


@pytest.fixture
def model() -> Tracked:
    return Tracked()


@pytest.mark.parametrize("budget", ["", "much", "12", "12 G", "12gigs", "-3GiB", "0B", "0%", "-5%", "nan%", "1001%"])
def test_text_that_is_no_budget_lists_the_accepted_forms(model: Tracked, budget: str) -> None:
    for call in (lambda: ebbtide.fit(model, budget), lambda: ebbtide.plan(model, (X,), budget=budget)):
        with pytest.raises(UsageError, match="12GiB"):
            call()
    assert type(model) is Tracked


@pytest.mark.parametrize("budget", [0, -1, 1.5, None, True, b"1GiB", [1], float("nan")])
def test_values_that_are_no_budget_list_the_accepted_forms(model: Tracked, budget: object) -> None:
    for call in (
        lambda: ebbtide.fit(model, budget),  # type: ignore[arg-type]
        lambda: ebbtide.plan(model, (X,), budget=budget),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match="12GiB"):
            call()


def test_an_unknown_planner_lists_the_known_ones(model: Tracked) -> None:
    with pytest.raises(UsageError, match="keep_all"):
        ebbtide.fit(model, "1MiB", options=ebbtide.Options(planner="best"))
    with pytest.raises(UsageError, match="keep_all"):
        ebbtide.plan(model, (X,), budget="1MiB", options=ebbtide.Options(planner="best"))


@pytest.mark.parametrize("machine", ["gpu", "", 3])
def test_an_unknown_machine_is_refused(model: Tracked, machine: object) -> None:
    with pytest.raises(UsageError):
        ebbtide.plan(model, (X,), budget="1MiB", machine=machine)  # type: ignore[arg-type]


@pytest.mark.parametrize("thing", [None, 3, lambda x: x, Tracked])
def test_what_is_no_module_is_refused(thing: object) -> None:
    with pytest.raises(UsageError, match=r"torch\.nn\.Module"):
        ebbtide.fit(thing, "1MiB")  # type: ignore[type-var]
    with pytest.raises(UsageError, match=r"torch\.nn\.Module"):
        ebbtide.plan(thing, (X,), budget="1MiB")  # type: ignore[arg-type]


# -- too small ------------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_is_refused_before_any_training(model: Tracked) -> None:
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    ebbtide.fit(model, "5KiB")
    with pytest.raises(BudgetError) as caught:
        model(X)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    error = caught.value
    assert error.budget_bytes == 5 * 1024
    assert error.budget_bytes < error.floor_bytes <= error.smallest_bytes
    assert error.resident_bytes >= sum(p.nbytes for p in model.parameters()) + X.nbytes
    assert "mlp_chain.py:" in error.pinned_by
    for fact in (str(error.smallest_bytes), "mlp_chain.py:", "resident"):
        assert fact in str(error)


def test_the_smallest_budget_that_is_named_works(model: Tracked) -> None:
    plain = copy.deepcopy(model)
    ebbtide.fit(model, "5KiB")
    with pytest.raises(BudgetError) as caught:
        model(X)
    ebbtide.unfit(model)
    ebbtide.fit(model, caught.value.smallest_bytes)
    for each in (model, plain):
        torch.manual_seed(4)
        each(X).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]


def test_a_call_that_was_refused_has_no_plan(model: Tracked) -> None:
    ebbtide.fit(model, 1, progress=None)
    assert ebbtide.plan_of(model) is None
    with pytest.raises(BudgetError) as caught:
        model(X)
    assert ebbtide.plan_of(model) is None, "its error says what would do"
    ebbtide.set_budget(model, caught.value.smallest_bytes)
    model(X).backward()
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.budget_bytes == caught.value.smallest_bytes


def test_one_byte_less_than_the_floor_never_works(model: Tracked) -> None:
    plan = ebbtide.plan(model, (X,), budget="1MiB")
    with pytest.raises(BudgetError):
        ebbtide.plan(model, (X,), budget=plan.floor_bytes - 1)


def test_smallest_is_that_of_these_costs() -> None:
    case = mlp_chain(64, layers=4, width=16)
    program = ebbtide.plan(case.model, case.args, budget="1MiB").program
    light, _ = smallest_of(program)
    heavy, _ = smallest_of(program.with_costs([1.0] * len(program.ops), [10**6] * len(program.ops)))
    assert heavy >= light + 10**6


def test_a_planner_that_finds_nothing_says_so_and_names_one_that_does(model: Tracked) -> None:
    smallest = ebbtide.plan(model, (X,), budget="1MiB").smallest_bytes
    with pytest.raises(BudgetError, match="keep_all") as caught:
        ebbtide.plan(model, (X,), budget=smallest, options=ebbtide.Options(planner="keep_all"))
    assert caught.value.smallest_bytes <= smallest


# -- a plan that is given -------------------------------------------------------------------------------------


def test_a_first_call_tells_what_it_does_and_what_it_planned(model: Tracked) -> None:
    told: list[Progress] = []
    ebbtide.fit(model, "80%", progress=told.append)
    model(X).backward()
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert told[0] == Progress("capturing the step of Tracked")
    assert told[-2:] == [
        Progress("planned", plan.overhead, plan.bound),
        Progress("lowering the plan and proving its graphs"),
    ]
    assert all(one != following for one, following in itertools.pairwise(told))
    assert len(told) > 4
    count = len(told)
    model(X).backward()
    assert len(told) == count, "a later call has nothing to plan"


def test_a_given_plan_is_what_runs(model: Tracked, tmp_path: Path) -> None:
    tight = ebbtide.plan(model, (X,), budget=ebbtide.plan(model, (X,), budget="1MiB").smallest_bytes)
    for plan in (tight, Plan.load(tight.save(tmp_path / "plan.json"))):
        ebbtide.fit(model, plan)
        model(X).backward()
        ran = ebbtide.plan_of(model)
        assert ran is not None
        assert ran.schedule == tight.schedule
        model.zero_grad()
        ebbtide.unfit(model)


def test_a_plan_for_another_machine_is_a_start_and_never_run(model: Tracked) -> None:
    here = ebbtide.plan(model, (X,), budget="70%", options=ebbtide.Options(effort=200))
    elsewhere = replace(here, machine=machine_named("t4-16gb"), provenance=replace(here.provenance, machine="t4-16gb"))
    ebbtide.fit(model, elsewhere)
    with pytest.raises(PlanMismatch, match=r"machine: plan 't4-16gb', here 'cpu'.*start=plan") as caught:
        model(X)
    assert caught.value.differences == ("machine: plan 't4-16gb', here 'cpu'",)
    ebbtide.unfit(model)
    named = replace(here, provenance=replace(here.provenance, name="another kind of CPU"))
    ebbtide.fit(model, named)
    with pytest.raises(PlanMismatch, match="name: plan 'another kind of CPU'"):
        model(X)
    ebbtide.unfit(model)
    ebbtide.fit(model, here.budget_bytes, options=ebbtide.Options(start=elsewhere, effort=1, planner="greedy"))
    model(X).backward()
    ran = ebbtide.plan_of(model)
    assert ran is not None
    assert ran.machine is None
    assert ran.provenance.costs is Costs.MEASURED
    assert ran.program.fingerprint == here.program.fingerprint


def test_a_start_is_where_the_search_starts(model: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Problem] = []

    def listening(name: str) -> Callable[[Problem], Answer]:
        def plan(problem: Problem) -> Answer:
            asked.append(problem)
            return planner_named(name)(problem)

        return plan

    start = ebbtide.plan(model, (X,), budget="80%", options=ebbtide.Options(rewrites="none"))
    monkeypatch.setattr(one_program, "planner_named", listening)
    ebbtide.fit(model, "90%", options=ebbtide.Options(start=start, rewrites="none"))
    model(X).backward()
    assert asked
    assert all(start.schedule in problem.seeds for problem in asked)


def test_a_start_of_another_step_is_said_not_to_be_used(model: Tracked) -> None:
    other = mlp_chain(32, layers=2, width=16)
    ebbtide.fit(
        model, "80%", options=ebbtide.Options(start=ebbtide.plan(other.model, other.args, budget="1MiB"), effort=50)
    )
    with pytest.warns(UserWarning, match="is of another step than the one captured here"):
        model(X).backward()


@pytest.mark.parametrize("start", ["plan.json", 3, True])
def test_a_start_that_is_no_plan_is_refused(model: Tracked, start: object) -> None:
    with pytest.raises(UsageError, match="start takes"):
        ebbtide.fit(model, "80%", options=ebbtide.Options(start=start))  # type: ignore[arg-type]
    plan = ebbtide.plan(model, (X,), budget="1MiB")
    with pytest.raises(UsageError, match="not both"):
        ebbtide.fit(model, plan, options=ebbtide.Options(start=plan))


def test_a_plan_of_another_program_is_refused_with_the_difference(model: Tracked) -> None:
    other = mlp_chain(32, layers=2, width=16)
    plan = ebbtide.plan(other.model, other.args, budget="1MiB")
    ebbtide.fit(model, plan)
    with pytest.raises(PlanMismatch, match=r"the plan's has \d+ ops, this one \d+"):
        model(X)
    assert model.steps.item() == 0.0


def test_a_plan_of_another_shape_is_refused(model: Tracked) -> None:
    ebbtide.fit(model, ebbtide.plan(model, (X,), budget="1MiB"))
    model(X).backward()
    with pytest.raises(PlanMismatch, match="where this one has"):
        model(X[:8])


@pytest.mark.parametrize(("fact", "value"), [("torch", "1.0"), ("device", "cuda")])
def test_a_plan_of_another_build_or_device_is_refused(model: Tracked, fact: str, value: str) -> None:
    plan = ebbtide.plan(model, (X,), budget="1MiB")
    ebbtide.fit(model, replace(plan, provenance=replace(plan.provenance, **{fact: value})))
    with pytest.raises(PlanMismatch, match=f"{fact}: plan '{value}', here '"):
        model(X)


def test_a_plan_that_no_longer_fits_is_refused(model: Tracked) -> None:
    plan = ebbtide.plan(model, (X,), budget="1MiB")
    tight = ebbtide.plan(model, (X,), budget=plan.smallest_bytes)
    ebbtide.fit(
        model,
        replace(tight, reserve_bytes=0, budget_bytes=tight.budget_bytes - tight.reserve_bytes),
        options=ebbtide.Options(verify=False),
    )
    model(X).backward()
    with pytest.raises(BudgetError, match="more is resident"):  # the gradients
        model(X)
    model.zero_grad()
    model(X).backward()

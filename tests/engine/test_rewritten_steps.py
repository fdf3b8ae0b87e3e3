"""Steps whose head is rewritten: below what any plan of the captured step needs, with eager's bits."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide import options
from ebbtide.capture.rules import layouts
from ebbtide.cost import profiling_budget
from ebbtide.cost.call import Call, call_with
from ebbtide.cost.mapped import mapped
from ebbtide.cost.profiling_budget import NotProfiled, ProfilingBudget, arguments_for, profiling_within
from ebbtide.errors import BudgetError, PlanFileError, PlanMismatch, UsageError
from ebbtide.planning.alternatives import Alternative, Alternatives
from ebbtide.rewrites import choices, facts
from ebbtide.torch_seams import fake_tensors
from head_models import CLASSES, FORMS, LEFT, TOKENS, Tower, arguments
from sampled import sampled

SHARE = {"returned": 0.93, "bfloat16, cut and cast, returned": 0.93, "bfloat16, capped and returned": 0.93}
"""Of the least budget that the captured step has; logits that are returned stay."""


@pytest.fixture
def heads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other rewrite is tried where those of heads do not do."""
    monkeypatch.setattr(options, "_FURTHER", ())


def loss_of(outputs: Any) -> torch.Tensor:
    return outputs["loss"] if isinstance(outputs, dict) else outputs


def history(model: Tower, backward: Callable[[torch.Tensor, int], None]) -> list[torch.Tensor]:
    """Losses, gradients and random states of four steps on other data each."""
    sgd = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    torch.manual_seed(3)
    found: list[torch.Tensor] = []
    for i in range(4):
        loss = loss_of(model(*arguments(i)))
        backward(loss, i)
        found += [loss.detach().clone(), torch.get_rng_state()]
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        sgd.step()
        if i != 1:  # accumulated once
            sgd.zero_grad()
    return found


def once(loss: torch.Tensor, i: int) -> None:
    """The second and third time of another loss than the forward guesses."""
    (loss * 3 if i in (1, 2) else loss).backward()


@functools.cache
def least(form: str) -> int:
    """The smallest budget of the captured step: bytes alone, so that it is looked for once."""
    model = ebbtide.fit(FORMS[form](), 1, progress=None, options=ebbtide.Options(rewrites="none"))
    with pytest.raises(BudgetError) as refused:
        model(*arguments())
    assert refused.value.smallest_bytes is not None
    return refused.value.smallest_bytes


def below(form: str) -> int:
    """A budget that no plan of the captured step fits."""
    return int(SHARE.get(form, 0.8) * least(form))


def only_of(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Plans may use these forms of heads and nothing else."""
    every = choices.alternatives_of

    def of_these_kinds(*args: Any, **options: Any) -> Alternatives:
        found = every(*args, **options)

        def among(alternatives: list[Alternative]) -> list[Alternative]:
            return [each for each in alternatives if {one.form for one in each.rewrites} <= {*kinds}]

        return Alternatives(lambda: among(found.first), lambda: among(found.further))

    for where in ("engine.plans", "_api.estimate"):
        monkeypatch.setattr(f"ebbtide.{where}.alternatives_of", of_these_kinds)


COMBINED = re.compile(r"(cut|smoothed|capped), (bias|tied|frozen)")
"""Forms of which each half is in another; that they are found and proven every change sees in ``test_heads``."""


@pytest.mark.usefixtures("heads_alone")
@pytest.mark.parametrize("form", sampled(FORMS, *(each for each in FORMS if not COMBINED.fullmatch(each))))
def test_a_rewritten_step_trains_as_eager_below_the_captured_ones_least(form: str) -> None:
    model = FORMS[form]()
    expected = history(copy.deepcopy(model), once)
    budget = below(form)
    ebbtide.fit(model, budget, progress=None)
    found = history(model, once)
    assert all(map(torch.equal, found, expected))
    assert ebbtide.calls_of(model).planned == 4
    plan, step = ebbtide.plan_of(model), ebbtide.step_of(model)
    assert plan is not None
    assert plan.rewritten is not None
    assert step is not None
    assert step.measured_above_bytes is not None
    assert plan.resident_bytes + step.measured_above_bytes <= budget
    assert "linear-cross-entropy" in plan.details


@pytest.mark.parametrize("form", ["plain", "bfloat16, upcast", "frozen"])
@pytest.mark.parametrize("kind", ["kept", "guessed", "rows"])
def test_each_form_trains_as_eager(form: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FORMS[form]()
    expected = history(copy.deepcopy(model), once)
    only_of(monkeypatch, kind)
    ebbtide.fit(model, int(0.95 * least(form)), progress=None)
    assert all(map(torch.equal, history(model, once), expected))
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.rewritten is not None
    assert plan.rewritten.rewrites[0].form == kind


def test_nothing_larger_than_the_budget_is_tried_out_while_the_step_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The numbers of smoothed labels are added as an expanded column, whose layout torch is not trusted with."""
    roomy = ebbtide.plan(
        FORMS["smoothed"](), arguments(), budget=below("smoothed"), options=ebbtide.Options(progress=None)
    )
    budget = int(1.02 * roomy.smallest_bytes)
    largest: list[int] = []
    honest = layouts.run_alone

    def run_alone(call: Call) -> Any:
        with ebbtide.measure() as gauge:
            result = honest(call)
        largest.append(gauge.above_bytes)
        return result

    monkeypatch.setattr(layouts, "_measured", {})
    monkeypatch.setattr(layouts, "run_alone", run_alone)
    model = FORMS["smoothed"]()
    resident = sum(each.nbytes for each in model.parameters())
    monkeypatch.setattr(fake_tensors, "_remembered", {})
    ebbtide.fit(model, budget, progress=None)
    loss_of(model(*arguments())).backward()
    free = budget - resident
    assert 2 * TOKENS * CLASSES * 4 > free, "operand and result of the largest are not both in memory"
    assert 0 < max(largest) <= free


def test_graphs_that_are_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(loss: torch.Tensor, i: int) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    plans: dict[str, ebbtide.Plan] = {}
    for kind in ("rows", "kept"):  # which finds out what they take, and that facts hold
        with monkeypatch.context() as patch:
            only_of(patch, kind)
            plans[kind] = ebbtide.plan(
                FORMS["plain"](), arguments(), budget=below("plain"), options=ebbtide.Options(progress=None)
            )
    only_of(monkeypatch, "kept", "rows")  # the former is the cheaper one, and writes over what it has kept
    model = FORMS["plain"]()
    expected = history(copy.deepcopy(model), twice)
    ebbtide.fit(model, int(1.35 * plans["kept"].smallest_bytes), progress=None)
    with pytest.warns(UserWarning, match="retains its graph|retain_graph=True"):  # the first time, since nobody knew
        found = history(model, twice)
    assert all(map(torch.equal, found, expected))
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.rewritten is not None
    assert plan.rewritten.rewrites[0].form == "rows"


def test_nothing_is_rewritten_where_that_is_switched_off_or_facts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = below("plain")
    with pytest.raises(BudgetError):
        ebbtide.fit(FORMS["plain"](), budget, progress=None, options=ebbtide.Options(rewrites="none"))(*arguments())
    monkeypatch.setattr(choices, "measured", lambda found, device: dict.fromkeys((f.signature for f in found), False))
    with pytest.raises(BudgetError):
        ebbtide.fit(FORMS["plain"](), budget, progress=None)(*arguments())


def test_a_budget_that_asks_for_nothing_gets_the_captured_step() -> None:
    model = ebbtide.fit(FORMS["plain"](), "200%", progress=None)
    loss_of(model(*arguments())).backward()
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.rewritten is None


@pytest.mark.usefixtures("heads_alone")
@pytest.mark.parametrize("form", LEFT)
def test_what_only_looks_alike_is_planned_as_it_is(form: str) -> None:
    model = LEFT[form][0]()
    expected = history(copy.deepcopy(model), once)
    ebbtide.fit(model, "95%", progress=None)
    assert all(map(torch.equal, history(model, once), expected))
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.rewritten is None


def test_a_refusal_tells_the_least_budget_of_all_programs() -> None:
    model = FORMS["plain"]()
    plan_below(FORMS["plain"]())  # where there is room, it is found out what rewrites rest on; a budget of 1 has none
    with pytest.raises(BudgetError) as refused:
        ebbtide.fit(model, 1, progress=None)(*arguments())
    ebbtide.unfit(model)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    assert smallest < least("plain")
    ebbtide.fit(model, smallest, progress=None)
    loss_of(model(*arguments())).backward()


# -- plans --------------------------------------------------------------------------------------------------------


def plan_below(model: Tower, **settings: Any) -> ebbtide.Plan:
    return ebbtide.plan(model, arguments(), budget=below("plain"), options=ebbtide.Options(progress=None, **settings))


@pytest.mark.usefixtures("heads_alone")
def test_a_plan_says_what_it_rewrites_and_keeps_it_in_its_file(tmp_path: Path) -> None:
    plan = plan_below(FORMS["plain"]())
    assert plan.rewritten is not None
    (rewrite,) = plan.rewritten.rewrites
    assert f"{rewrite.form} (" in plan.details
    assert "rests on what was measured here" in plan.details
    again = ebbtide.Plan.load(plan.save(tmp_path / "plan.json"))
    assert again.rewritten == plan.rewritten
    assert again.fingerprint == plan.fingerprint
    assert (again.overhead, again.bound) == (plan.overhead, plan.bound)
    data = json.loads((tmp_path / "plan.json").read_text())
    data["rewritten"]["rewrites"] = 3
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanFileError):
        ebbtide.Plan.load(tmp_path / "plan.json")


def test_percent_overhead_and_bound_are_of_the_captured_step() -> None:
    captured = ebbtide.plan(
        FORMS["plain"](), arguments(), budget="200%", options=ebbtide.Options(rewrites="none", progress=None)
    )
    plan = plan_below(FORMS["plain"]())
    assert plan.baseline_peak_bytes == captured.baseline_peak_bytes
    assert plan.baseline_seconds == pytest.approx(captured.baseline_seconds)
    assert plan.overhead == pytest.approx(plan.step_seconds / captured.baseline_seconds - 1)
    if plan.bound is not None:
        assert plan.bound <= plan.overhead + 1e-9
    assert plan.bound_class.endswith("program: as rewritten")


def test_a_given_plan_runs_rewritten() -> None:
    model = FORMS["plain"]()
    expected = history(copy.deepcopy(model), once)
    plan = plan_below(FORMS["plain"]())
    # In the loop gradients are accumulated once, which takes more than a step that clears them.
    roomy = ebbtide.plan(FORMS["plain"](), arguments(), budget="90%", options=ebbtide.Options(progress=None))
    assert roomy.rewritten is not None or plan.rewritten is not None
    ebbtide.fit(model, plan if roomy.rewritten is None else roomy, progress=None)
    assert all(map(torch.equal, history(model, once), expected))


@pytest.mark.usefixtures("heads_alone")
def test_a_given_plan_of_another_step_or_on_other_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_below(FORMS["plain"]())
    with pytest.raises(PlanMismatch, match="no linear layer with a cross-entropy"):
        ebbtide.fit(LEFT["bent otherwise"][0](), plan, progress=None)(*arguments())
    monkeypatch.setattr(choices, "measured", lambda found, device: dict.fromkeys((f.signature for f in found), None))
    with pytest.raises(PlanMismatch, match="bits of the whole"):
        ebbtide.fit(FORMS["plain"](), plan, progress=None)(*arguments())


def test_a_plan_for_another_machine_lists_what_it_assumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_measured", lambda *_: pytest.fail("measured for a machine that is not here"))
    large = Tower(FORMS["plain"]().loss, classes=20_000)
    plan = ebbtide.plan(large, arguments(), budget="80%", machine="h100-80gb", options=ebbtide.Options(progress=None))
    assert plan.rewritten is not None
    assert "takes for granted, until fit measures it" in plan.details


def test_a_sweep_never_pays_more_for_more() -> None:
    smallest = below("plain")
    budgets = [smallest, int(1.1 * smallest), int(1.3 * smallest), int(1.6 * smallest), int(2.5 * smallest)]
    plans = ebbtide.sweep(FORMS["plain"](), arguments(), budgets=budgets, options=ebbtide.Options(progress=None))
    assert len(plans) == len(budgets)
    seconds = [plan.step_seconds for plan in plans]
    assert all(b <= a * (1 + 1e-9) for a, b in pairwise(seconds))
    assert plans[0].rewritten is not None


@pytest.mark.parametrize("planner", ["greedy", "keep_all"])
def test_planners_that_are_named_plan_what_they_are_given(planner: str) -> None:
    plan = ebbtide.plan(
        FORMS["plain"](), arguments(), budget="200%", options=ebbtide.Options(planner=planner, progress=None)
    )
    assert plan.rewritten is None


@pytest.mark.parametrize("value", ["fast", True, 1, ["exact"]])
def test_other_rewrites_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match='rewrites takes "exact" or "in-place" or "all" or "none"'):
        ebbtide.fit(FORMS["plain"](), "90%", options=ebbtide.Options(rewrites=value))


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_labels_that_are_no_class_are_refused_in_the_forward(label: int) -> None:
    model = ebbtide.fit(FORMS["plain"](), below("plain"), progress=None)
    tokens, labels = arguments()
    model(tokens, labels).backward()
    labels[0, 1] = label
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        model(tokens, labels)


def test_two_forwards_before_a_backward() -> None:
    def both(model: Tower) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for i in range(3):
            torch.manual_seed(i)
            model.zero_grad()
            (model(*arguments(i)) + 2 * model(*arguments(i + 7))).backward()
            found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        return found

    model = FORMS["plain"]()
    expected = both(copy.deepcopy(model))
    ebbtide.fit(model, below("plain"), progress=None)
    with pytest.warns(UserWarning, match="another forward of this model is in flight"):
        found = both(model)
    assert all(map(torch.equal, found, expected))


def test_nothing_is_tried_out_that_the_budget_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops of the captured step take more than a budget below its least: they are priced without running them."""
    large = call_with(torch.ops.aten.relu.default, (torch.empty(1000),), {}, [torch.empty(1000)])
    files: list[int] = []

    def counted(count: int, dtype: torch.dtype) -> torch.Tensor:
        files.append(count)
        return mapped(count, dtype)

    monkeypatch.setattr(profiling_budget, "mapped", counted)
    with profiling_within(ProfilingBudget(3_999, strict=True)), pytest.raises(NotProfiled):
        arguments_for(large)
    for free_bytes, in_files in ((4_000, [1000]), (7_999, [1000]), (8_000, [])):
        files.clear()
        with profiling_within(ProfilingBudget(free_bytes, strict=True)):
            arguments_for(large)
        assert files == in_files


def test_another_precision_of_products_is_another_step() -> None:
    """Facts about products in float32 say nothing of products in bfloat16, which a CPU may take for them."""

    def trained(model: Tower) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for i, precision in enumerate(("highest", "medium", "medium", "highest")):
            torch.set_float32_matmul_precision(precision)
            torch.manual_seed(i)
            model.zero_grad()
            model(*arguments(i)).backward()
            found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        return found

    model = FORMS["plain"]()
    try:
        expected = trained(copy.deepcopy(model))
        torch.set_float32_matmul_precision("highest")
        ebbtide.fit(model, int(0.9 * least("plain")), progress=None)
        assert all(map(torch.equal, trained(model), expected))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert ebbtide.calls_of(model).planned == 4


@pytest.mark.parametrize("rewrites", ["exact", None])
def test_asking_for_the_default_changes_nothing(rewrites: Any) -> None:
    budget = below("plain")
    plans = [
        ebbtide.plan(FORMS["plain"](), arguments(), budget=budget, options=ebbtide.Options(progress=None, **options))
        for options in ({}, {"rewrites": rewrites})
    ]
    assert plans[0].rewritten == plans[1].rewritten is not None


def test_a_head_that_holds_little_leaves_the_plan_as_it_was() -> None:
    """Such as a classifier's: nothing that its rewrite could save would decide anything."""

    def classifier() -> torch.nn.Module:
        torch.manual_seed(0)
        body = [torch.nn.Linear(64, 64) for _ in range(12)]
        return Classifier(torch.nn.Sequential(*(layer for each in body for layer in (each, torch.nn.GELU()))))

    class Classifier(torch.nn.Module):
        def __init__(self, body: torch.nn.Module) -> None:
            super().__init__()
            self.body, self.head = body, torch.nn.Linear(64, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.head(self.body(x)), y)

    values = torch.randn(512, 64), torch.randint(2, (512,))
    plans = [
        ebbtide.plan(classifier(), values, budget="60%", options=ebbtide.Options(rewrites=rewrites, progress=None))
        for rewrites in ("exact", "none")
    ]
    assert plans[0].rewritten is None
    assert plans[0].schedule == plans[1].schedule


@pytest.mark.usefixtures("heads_alone")
def test_verify_holds_a_rewritten_plan_against_the_captured_step_and_eager() -> None:
    plan = plan_below(FORMS["plain"]())
    assert plan.rewritten is not None
    seen = ebbtide.verify(FORMS["plain"](), arguments(), plan=plan)
    assert seen.equal
    assert not seen.eager_differences
    assert seen.within_budget
    captured = ebbtide.plan(
        FORMS["plain"](), arguments(), budget="200%", options=ebbtide.Options(rewrites="none", progress=None)
    )
    assert seen.baseline_above_bytes == captured.timeline.above_bytes
    with pytest.raises(PlanMismatch, match="no linear layer with a cross-entropy"):
        ebbtide.verify(LEFT["bent otherwise"][0](), arguments(), plan=plan)


# -- together with the rest ---------------------------------------------------------------------------------------


def test_rewrites_and_tiers(tmp_path: Path) -> None:
    """Below what moving buffers reaches alone, for the logits are there at once whatever moves."""
    model = FORMS["plain"]()
    expected = history(copy.deepcopy(model), once)
    tier = f"disk:{tmp_path}"
    with pytest.raises(BudgetError) as refused:
        ebbtide.plan(
            FORMS["plain"](), arguments(), budget=1, options=ebbtide.Options(tiers=tier, rewrites="none", progress=None)
        )
    assert refused.value.smallest_bytes is not None
    budget = int(0.8 * refused.value.smallest_bytes)
    ebbtide.fit(model, budget, tiers=tier, progress=None)
    found = history(model, once)
    assert all(map(torch.equal, found, expected))
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.rewritten is not None
    assert plan.predicted_peak_bytes <= budget


def test_lengths_that_share_a_capture() -> None:
    """More shapes than are captured one by one, each below the least budget of its captured step."""

    def trained(model: Tower) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for length in (40, 44, 48, 41, 47, 43, 46, 45):
            torch.manual_seed(length)
            model.zero_grad()
            tokens, labels = (each[:, :length].contiguous() for each in arguments())
            model(tokens, labels).backward()
            found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        return found

    model = FORMS["plain"]()
    expected = trained(copy.deepcopy(model))
    ebbtide.fit(model, below("plain"), progress=None)
    assert all(map(torch.equal, trained(model), expected))
    assert ebbtide.calls_of(model).planned == 8
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.rewritten is not None


def test_autocast() -> None:
    def trained(model: Tower) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for i in range(3):
            torch.manual_seed(i)
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*arguments(i))
            loss.backward()
            found += [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        return found

    model = FORMS["plain"]()
    expected = trained(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16):
        plan = ebbtide.plan(FORMS["plain"](), arguments(), budget="80%", options=ebbtide.Options(progress=None))
    assert plan.rewritten is not None
    ebbtide.fit(model, plan.budget_bytes, progress=None)
    assert all(map(torch.equal, trained(model), expected))


def test_a_scaled_loss_is_no_wrong_guess_for_long() -> None:
    """``GradScaler`` scales the loss outside of the step: the guess is wrong, and the gradient is made again."""

    def trained(model: Tower) -> list[torch.Tensor]:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        found: list[torch.Tensor] = []
        for i in range(4):
            torch.manual_seed(i)
            sgd.zero_grad()
            scaler.scale(model(*arguments(i))).backward()
            found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
            scaler.step(sgd)
            scaler.update()
        return [*found, *(each.detach().clone() for each in model.parameters())]

    model = FORMS["plain"]()
    expected = trained(copy.deepcopy(model))
    ebbtide.fit(model, below("plain"), progress=None)
    assert all(map(torch.equal, trained(model), expected))
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.rewritten is not None

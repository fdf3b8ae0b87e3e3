"""Gradients added up from rows, on request: all else has eager's bits, and the plan states what has not."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.capture.claims import RewriteError
from ebbtide.capture.joint import Captured
from ebbtide.capture.offline import capture
from ebbtide.engine import plans
from ebbtide.options import REWRITES, Options
from ebbtide.rewrites.heads.facts import HeadSizes
from ebbtide.rewrites.heads.find import find_heads
from ebbtide.rewrites.heads.forms import REORDERED, summed_forms_of
from ebbtide.rewrites.heads.reordered import ReorderedHeadRule, largest_difference
from ebbtide.rewrites.heads.rule import HeadRule
from head_models import FORMS, Tower, arguments

RULE = ReorderedHeadRule()
NONE = [form for form in FORMS if "frozen" in form or "smoothed" in form]


def captured_of(model: Tower) -> Captured:
    return capture(model, arguments(), {}, name="tower", granularity_bytes=64, context={"device": "cpu"})


def gradients(model: Tower) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    outputs = model(*arguments())
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("form", ["plain", "bias", "bfloat16, upcast", "cut, tied", "no reduction, cut", "scaled"])
def test_every_form_is_proven_and_a_mutant_is_not(form: str) -> None:
    step = captured_of(FORMS[form]())
    ways = list(RULE.ways(step))
    assert {each.form for way in ways for each in way} == {"summed"}
    for way in ways:
        assert len(RULE.prove(step, RULE.rewritten(step, way))) == 2
    mutant = RULE.rewritten(step, ways[0])
    node = next(each for each in mutant.graph.nodes if "backward_in_sums" in str(each.target))
    node.args = (*node.args[:4], node.args[5], *node.args[5:])
    with pytest.raises(RewriteError, match="another tangent"):
        RULE.prove(step, mutant)


@pytest.mark.parametrize("form", NONE)
def test_none_where_rows_are_exact_or_labels_are_smoothed(form: str) -> None:
    (head,), _ = find_heads(captured_of(FORMS[form]()))
    assert not list(summed_forms_of(head))


@pytest.mark.parametrize("form", ["plain", "bias", "bfloat16, upcast"])
def test_all_but_the_heads_gradients_have_eagers_bits(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FORMS[form]()
    loss, expected = gradients(copy.deepcopy(model))
    every = plans.alternatives_here

    def summed(*args: Any, **options: Any) -> Any:
        return [each for each in every(*args, **options) if each.rewrites[0].rule == REORDERED]

    monkeypatch.setattr(plans, "alternatives_here", summed)
    ebbtide.fit(model, "70%", rewrites="reordered", progress=None)
    gradients(model)  # proves the plan; the next one measures it
    model.zero_grad()
    found_loss, found = gradients(model)
    plan, step = ebbtide.plan_of(model), ebbtide.step_of(model)
    assert plan is not None
    assert step is not None
    assert plan.rewritten is not None
    assert step.measured_above_bytes is not None
    assert plan.resident_bytes + step.measured_above_bytes <= plan.budget_bytes
    stated = re.search(r"other last bits than eager's: by up to (\S+) of its largest number", str(plan))
    assert stated is not None
    assert torch.equal(loss, found_loss)
    for name, theirs in expected.items():
        if not name.startswith("head."):
            assert torch.equal(found[name], theirs), name
    ours, theirs = found["head.weight"].double(), expected["head.weight"].double()
    assert (ours - theirs).abs().max() <= 8 * max(float(stated[1]), 1e-7) * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_difference_is_that_of_sums_by_other_means(dtype: torch.dtype) -> None:
    sizes = HeadSizes(384, 32, 600, dtype, torch.float32, (32, 1), (1, 32), False, 1, "cpu")
    seen = largest_difference(sizes, 96)
    assert seen is not None
    # half a unit in the last place of the result for each of its two roundings, and float32's for each of the sums
    unit = torch.finfo(dtype).eps
    assert 0 < seen <= 4 * unit + 384 * torch.finfo(torch.float32).eps
    if dtype is torch.float32:
        assert largest_difference(sizes, 384) == 0  # one slice is the whole


@pytest.mark.parametrize("rule", ["guessed", "kept", "rows"])
def test_a_head_that_has_been_replaced_is_none(rule: str) -> None:
    step = captured_of(FORMS["plain"]())
    way = next(each for each in HeadRule().ways(step) if each[0].form == rule)
    assert not list(RULE.ways(HeadRule().rewritten(step, way)))


def test_it_is_asked_for_and_no_default() -> None:
    for each in (None, *REWRITES):
        assert (REORDERED in Options(rewrites=each).rewrite_rules) == (each == "reordered")


def test_a_plan_for_another_machine_says_that_the_difference_is_not_known() -> None:
    found = [
        ebbtide.plan(
            Tower(FORMS["plain"]().loss, classes=20_000),
            arguments(),
            budget=budget,
            machine="h100-80gb",
            rewrites="reordered",
            progress=None,
        )
        for budget in ("80%", "60%")
    ]
    used = [plan for plan in found if plan.rewritten is not None and plan.rewritten.rewrites[0].rule == REORDERED]
    assert all("by how much is not known here" in str(plan) for plan in used)

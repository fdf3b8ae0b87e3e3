"""The first step holds what ops of rewrites give against the captured ops, where the budget has room for these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide._api.estimate import capture_program
from ebbtide.errors import VerificationError
from ebbtide.lower.compared import How
from ebbtide.rewrites.choices import Choice
from ebbtide.rewrites.heads import kernels as head_kernels
from ebbtide.rewrites.heads.rule import HeadRule
from ebbtide.rewrites.heads.slices import Operands
from ebbtide.rewrites.in_place.forms import InPlace
from ebbtide.rewrites.in_place.rule import InPlaceRule
from ebbtide.rewrites.rule import Rule
from ebbtide.rewrites.sliced.calls import InSlices
from ebbtide.rewrites.sliced.rule import FEED_FORWARD
from ebbtide.step.rewrite import Rewritten
from ebbtide.step.unplanned import unplanned_bytes, unplanned_schedule
from head_models import CLASSES, FORMS, TOKENS, arguments

WHOLE, SAMPLED, RESTS = (each.value for each in How)
HEADS = ("plain", "bfloat16, upcast", "cut, tied", "smoothed")


def planned(rule: Rule, model: nn.Module, args: tuple[Any, ...], form: str = "", room: int = 0) -> list[ebbtide.Plan]:
    """The unplanned step with the first candidate of each form of ``rule``, and a budget of so much room beyond."""
    step, program, _ = capture_program(model, args, {})
    roomy = ebbtide.plan(model, args, budget="200%", options=ebbtide.Options(rewrites="none", progress=None))
    plans: dict[str, ebbtide.Plan] = {}
    for candidate in rule.candidates(step):
        if candidate[0].form not in plans and (not form or candidate[0].form == form):
            if (costed := Choice(step, candidate).costed("cpu", program)) is None:
                continue  # its facts do not hold here
            rewritten = Rewritten(costed.rewrites, program.seconds, unplanned_bytes(program))
            schedule = unplanned_schedule(costed.program)
            plan = replace(roomy, program=costed.program, schedule=schedule, rewritten=rewritten, floor_op=0)
            least = plan.predicted_peak_bytes + plan.reserve_bytes
            plans[candidate[0].form] = replace(plan, budget_bytes=least + room)
    assert plans
    return list(plans.values())


class Layers(nn.Module):
    """Feed-forward layers whose hidden values pin the step, and chains that may be computed in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(33, 40)
        self.up, self.down = (nn.ModuleList(nn.Linear(*size) for _ in range(2)) for size in ((40, 192), (192, 40)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.sigmoid(up(x)) * 0.5)
        return x.square().mean()


def rows() -> tuple[torch.Tensor]:
    return (torch.randn(3, 173, 33, generator=torch.Generator().manual_seed(1)),)


def trained(model: nn.Module, args: tuple[Any, ...]) -> list[torch.Tensor]:
    torch.manual_seed(2)
    loss = model(*args)
    loss = loss["loss"] if isinstance(loss, dict) else loss
    loss.sum().backward()
    gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    return [loss.detach().clone(), *gradients, torch.get_rng_state()]


@pytest.mark.parametrize("form", HEADS)
def test_every_op_of_every_form_of_a_head_is_held_where_there_is_room(form: str) -> None:
    expected = trained(FORMS[form](), arguments())
    for plan in planned(HeadRule(), FORMS[form](), arguments(), room=10**9):
        model = ebbtide.fit(FORMS[form](), plan, progress=None)
        assert all(map(torch.equal, trained(model, arguments()), expected))
        step = ebbtide.step_of(model)
        assert step is not None
        ops = sum("ebbtide_rewrites" in op.target for op in plan.program.ops)
        assert step.rewrites_held == {WHOLE: ops}
        assert f"{ops} rewritten {WHOLE}" in repr(step)


@pytest.mark.parametrize("rule", [FEED_FORWARD, InPlaceRule()], ids=["in slices", "in place"])
def test_calls_in_slices_and_in_place_are_held_too(rule: Rule) -> None:
    expected = trained(Layers(), rows())
    for plan in planned(rule, Layers(), rows(), room=10**9):
        model = ebbtide.fit(Layers(), plan, progress=None)
        assert all(map(torch.equal, trained(model, rows()), expected))
        step = ebbtide.step_of(model)
        assert step is not None
        assert set(step.rewrites_held) == {WHOLE}
        assert step.rewrites_held[WHOLE] == len(plan.program.ops) - plain_ops(plan)


def plain_ops(plan: ebbtide.Plan) -> int:
    return sum(op.target.startswith("aten.") for op in plan.program.ops)


def test_what_there_is_no_room_for_is_held_in_samples_or_rests_on_facts() -> None:
    logits = TOKENS * CLASSES * 4
    found = {
        room: [held(plan) for plan in planned(HeadRule(), FORMS["plain"](), arguments(), "rows", room)[:1]]
        for room in (0, logits, 3 * logits)
    }
    assert found == {
        0: [{RESTS: 3}],
        logits: [{SAMPLED: 3}],
        3 * logits: [{WHOLE: 3}],
    }


def held(plan: ebbtide.Plan) -> dict[str, int]:
    """How its ops are; the first step, in which they are, is within the budget."""
    model = ebbtide.fit(FORMS["plain"](), plan, progress=None)
    args = arguments()
    with ebbtide.measure(model) as gauge:
        model(*args).backward()
    assert plan.resident_bytes + gauge.above_bytes <= plan.budget_bytes
    step = ebbtide.step_of(model)
    assert step is not None
    return dict(step.rewrites_held)


# -- what is wrong is found -----------------------------------------------------------------------------------------


def off_by_a_bit(value: torch.Tensor) -> torch.Tensor:
    """The same numbers, but for the last bit of the last of them; in the same memory."""
    last = value.view(-1)[-1:] if value.is_contiguous() else value.flatten()[-1:]
    last.copy_(torch.nextafter(last, torch.full_like(last, float("inf"))))
    return value


def wrong(function: Callable[..., Any], take: Callable[[Any], torch.Tensor]) -> Callable[..., Any]:
    """``function``, with one of its results off by a bit."""

    def called(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        off_by_a_bit(take(result))
        return result

    return called


WRONG: dict[str, tuple[str, Callable[[Any], torch.Tensor], str]] = {
    "the loss": ("loss_and_weight", lambda result: result[0], "forward_by_rows"),
    "hidden states": ("pass_over_rows", lambda result: result[0], "backward_by_rows"),
    "the weight": ("gradients_by_columns", lambda result: result[0], "backward_by_columns"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_result_with_one_other_bit_is_found_before_it_is_handed_out(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, take, op = WRONG[what]
    (plan,) = planned(HeadRule(), FORMS["plain"](), arguments(), "rows", room=10**9)
    with monkeypatch.context() as patched:
        patched.setattr(head_kernels, name, wrong(getattr(head_kernels, name), take))
        refused(FORMS["plain"](), plan, arguments(), op)


def refused(model: nn.Module, plan: ebbtide.Plan, args: tuple[Any, ...], op: str) -> None:
    """Its first step raises; no gradient is there, random state is as before, and without the plan it goes on."""
    torch.manual_seed(2)
    before = torch.get_rng_state()
    ebbtide.fit(model, plan, progress=None)
    with pytest.raises(VerificationError, match=f"{op}.*takes the place of a part of the captured step") as error:
        model(*args).backward()
    assert op in error.value.op
    assert all(each.grad is None for each in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_slices_that_are_not_those_of_the_whole_on_these_numbers_are_found_by_a_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (plan,) = planned(HeadRule(), FORMS["plain"](), arguments(), "rows", room=TOKENS * CLASSES * 4)
    whole = Operands.logits

    def sliced(x: Operands, out: torch.Tensor | None = None) -> torch.Tensor:
        made = whole(x, out)
        return made if x.h.shape[0] == TOKENS else off_by_a_bit(made)

    with monkeypatch.context() as patched:
        patched.setattr(Operands, "logits", sliced)
        refused(FORMS["plain"](), plan, arguments(), "forward_by_rows")


@pytest.mark.parametrize(
    ("rule", "kind"), [(FEED_FORWARD, InSlices), (InPlaceRule(), InPlace)], ids=["in slices", "in place"]
)
def test_a_wrong_call_in_slices_or_in_place_is_found(rule: Rule, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(rule, Layers(), rows(), room=10**9)[0]

    def first(result: Any) -> torch.Tensor:
        return result[0] if isinstance(result, tuple) else result

    with monkeypatch.context() as patched:
        patched.setattr(kind, "__call__", wrong(kind.__call__, first))
        refused(Layers(), plan, rows(), "")

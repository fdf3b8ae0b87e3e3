"""Memory-efficient attention and recurrent layers, found by the default plan on models that know nothing of it.

1. Additive attention in a loop: each step's sum and tanh, of batch x places x size, are made again alone in the
   backward, and no product is, except that of the keys, which all steps share and which are as large.
2. Gates of an LSTM: likewise.
3. Softmax attention written out: its weights, of batch x heads x queries x places, are made again from queries and
   keys.

``plan.explain`` says so. Sizes are those of a card: nothing runs, costs are by roofline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ebbtide import Budget, Case, Plan
from ebbtide._api.estimate import capture_ahead
from ebbtide.capture.without_memory import without_memory
from ebbtide.options import Options
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planning.pipeline import PlanningOptions
from ebbtide.step.schedule import Compute
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide_published.zoo.attention import AdditiveAttention
from ebbtide_published.zoo.nmt import NMTConfig, nmt, nmt_luong

PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"}
_Counts = Counter[tuple[str, str]]


class Looped(nn.Module):
    """A query at a time, additive score."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = AdditiveAttention(width)

    def forward(self, queries: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        keys = self.attention.key(memory)
        return torch.stack([self.attention(query, keys, memory) for query in queries.unbind(1)]).square().mean()


class Softmax(nn.Module):
    """Layers of softmax(Q K') V, written out."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            query, key, value = layer(x).chunk(3, -1)
            x = x + torch.bmm(torch.bmm(query, key.transpose(1, 2)).softmax(-1), value)
        return x.square().mean()


def planned(make: Callable[[], Case], share: float) -> Plan:
    """The plan of a case at ``share`` of the way from the floor to the peak of its unplanned step."""
    with without_memory():
        case = make()
        step = capture_ahead(
            case.model, case.args, case.kwargs, name=case.name, options=Options(machine="titanxp-12gb")
        )
    floor, _ = floor_bytes(step.program)
    above = int(floor + share * (unplanned_bytes(step.program) - floor))
    budget = Budget(bytes=step.resident_bytes + step.reserve_bytes + above)
    return step.plan(budget, PlanningOptions(effort=1000))


def made_again(plan: Plan) -> _Counts:
    """How often ops run once more, by target and module."""
    runs = Counter(each.op for each in plan.schedule.actions if isinstance(each, Compute))
    ops = plan.program.ops
    again = _Counts()
    for op, times in runs.items():
        again[ops[op].target, ops[op].module] += times - 1
    return +again


def products(again: _Counts) -> set[str]:
    """Modules of which a product runs again, but for attention's own and the head's: these have few tokens to score."""
    modules = {module for target, module in again if target in PRODUCTS}
    return {module for module in modules if module != "head" and not module.startswith("attention")}


def explained(plan: Plan, target: str, module: str) -> str:
    """What is said of the first buffer of such an op that runs again in the backward."""
    runs = Counter[int]()
    for action in plan.schedule.actions:
        if isinstance(action, Compute):
            runs[action.op] += 1
    ops = plan.program.ops
    op = next(o for o, n in sorted(runs.items()) if n > 1 and (ops[o].target, ops[o].module) == (target, module))
    return plan.explain(plan.program.buffers[ops[op].outputs[0]].name)


@pytest.fixture(scope="module")
def looped() -> Plan:
    queries, memory = (torch.randn(32, length, 512, requires_grad=True) for length in (24, 100))
    return planned(lambda: Case(Looped(512), (queries, memory)), 0.6)


def test_scores_of_steps_are_made_again_one_by_one(looped: Plan) -> None:
    again = made_again(looped)
    assert again["aten.tanh.default", "attention"] >= 8
    assert again["aten.add.Tensor", "attention"] >= 8
    assert not any(target in PRODUCTS for target, _ in again)


def test_what_is_said_of_a_score(looped: Plan) -> None:
    said = explained(looped, "aten.tanh.default", "attention")
    assert "dropped and made again once: after " in said
    assert "for 1 run of tanh" in said
    assert "for 1 run before that: add" in said
    program = looped.program
    backward = {op.name for op in program.ops[program.boundary :]}
    reader = said.split("dropped and made again once: ")[1].split(" for ")[1].split("\n")[0]
    assert reader in backward


@pytest.mark.parametrize("form", ["bahdanau", "sockeye"])
def test_scores_in_a_translation_model(form: str) -> None:
    config = NMTConfig(mlp=form == "sockeye", vocabulary=64, length=8, width=512, dropout=0.0)
    again = made_again(planned(lambda: nmt(256, config=config), 0.6))
    assert again["aten.tanh.default", "attention"] > 0
    assert again["aten.add.Tensor", "attention"] > 0
    assert not products(again)


def test_gates_are_made_again_and_not_their_products() -> None:
    plan = planned(lambda: nmt_luong(256, vocabulary=64, length=8, width=512, dropout=0.0), 0.7)
    again = made_again(plan)
    gates = ("aten.tanh.default", "aten.sigmoid.default", "aten.mul.Tensor")
    found = [target for target in gates if again[target, "encoder"]]
    assert found
    assert not products(again)
    assert "made again once" in explained(plan, found[0], "encoder")


def test_weights_of_softmax_attention_are_made_again_from_queries_and_keys() -> None:
    plan = planned(lambda: Case(Softmax(4, 64), (torch.randn(8, 512, 64),)), 0.5)
    softmax = {module for target, module in made_again(plan) if target == "aten._softmax.default"}
    assert softmax
    said = explained(plan, "aten._softmax.default", min(softmax))
    assert "made again once" in said
    assert "bmm" in said.split("before that: ")[1]

"""Ops that write over what dies: where, with which bits, at which peak, and the proof."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import ebbtide
from ebbtide._api.estimate import capture_program
from ebbtide._api.verify import Verifier
from ebbtide.capture.claims import RewriteError
from ebbtide.capture.joint import Captured
from ebbtide.case import Case
from ebbtide.cost.profile import profile_calls
from ebbtide.errors import InternalError
from ebbtide.lower.lowering import lower
from ebbtide.lower.proof import prove
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.rewrites import choices, facts
from ebbtide.rewrites.choices import Choice, apply_proven
from ebbtide.rewrites.in_place.chains import chains_of
from ebbtide.rewrites.in_place.facts import overwriting_fact
from ebbtide.rewrites.in_place.forms import InPlace, operands_of, overwriting_form
from ebbtide.rewrites.in_place.rule import InPlaceRule
from ebbtide.rewrites.reference import PART, parts_of
from ebbtide.step.rewrite import Rewrite, Rewritten
from ebbtide.step.unplanned import unplanned_bytes, unplanned_schedule
from ebbtide.units import Budget
from random_models import random_case

RULE = InPlaceRule()
aten = torch.ops.aten


class Block(nn.Module):
    """Residuals, a gated layer, softmax by hand, smoothed labels: what dies in an elementwise op, in every place."""

    def __init__(self, words: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(32)
        self.first, self.second, self.third = (nn.Linear(32, 64) for _ in range(3))
        self.back = nn.Linear(64, 32)
        self.head = nn.Linear(32, words)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.back(F.silu(self.first(y)) * self.second(y) + torch.tanh(self.third(y)))
        weights = torch.softmax((x @ x.transpose(1, 2)) * 0.2 + 1.0, -1)
        x = x + weights @ x
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def block_case(words: int = 120) -> Case:
    """A step of a block; from some 400 words on, what its least budget is is proven to be up to its loss."""
    drawn = torch.Generator().manual_seed(1)
    x, labels = torch.randn(4, 24, 32, generator=drawn), torch.randint(words, (4, 24), generator=drawn)
    return Case(Block(words), (x, labels), {})


def captured_of(case: Case) -> tuple[Captured, ebbtide.Program]:
    step, program, _ = capture_program(case.model, case.args, dict(case.kwargs))
    return step, program


def verified(case: Case) -> int:
    """How many places the candidates of ``case`` have, with the captured step's bits and the predicted bytes."""
    step, program = captured_of(case)
    overwrites = 0
    plain = make_plan(program, Budget.parse("200%"), resident_bytes=0, options=PlanningOptions(planner="keep_all"))
    verifier = None
    for candidate in RULE.candidates(step):
        costed = Choice(step, candidate).costed("cpu", program)
        if costed is None:
            continue
        rewritten = Rewritten(costed.rewrites, program.seconds, unplanned_bytes(program))
        schedule = unplanned_schedule(costed.program)
        plan = replace(plain, program=costed.program, schedule=schedule, rewritten=rewritten, floor_op=0)
        verifier = verifier or Verifier(case.model, case.args, case.kwargs)
        found = verifier.check(plan)
        assert found.differences == ()
        assert abs(found.measured_above_bytes - found.predicted_above_bytes) <= 0.001 * found.predicted_above_bytes + 64
        overwrites += sum(each["places"] for each in costed.rewrites)
    return overwrites


def test_a_block_has_the_same_bits_and_a_lower_peak() -> None:
    case = block_case()
    step, program = captured_of(case)
    lean, every = RULE.candidates(step)
    assert (lean[0].form, every[0].form) == ("lean", "all")
    names = {each.facts[0].partition(" ")[0] for each in every}
    assert {"_log_softmax", "_softmax", "_log_softmax_backward_data", "add.Tensor", "mul.Tensor"} <= names
    estimated = Choice(step, every).estimated(program)
    assert unplanned_bytes(estimated) < unplanned_bytes(program)
    assert estimated.seconds == pytest.approx(program.seconds)
    assert verified(case) > 20


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))])
def test_random_models_have_the_same_bits(seed: int) -> None:
    verified(random_case(seed))


@pytest.mark.parametrize(
    "name", ["unet", *(pytest.param(each, marks=pytest.mark.long) for each in ("resnet50", "hf_gpt2"))]
)
def test_models_of_the_zoo_have_the_same_bits(name: str) -> None:
    from ebbtide.zoo.small import SMALL

    assert verified(SMALL[name]()) > 15


# -- overwriting forms --------------------------------------------------------------------------------------------


def test_forms_are_kernels_of_their_own() -> None:
    assert overwriting_form(aten.add.Tensor) == (aten.add.out, "out")
    assert overwriting_form(aten.gelu_backward.default) == (aten.gelu_backward.grad_input, "grad_input")
    assert overwriting_form(aten._log_softmax_backward_data.default) == (aten._log_softmax_backward_data.out, "out")
    for other in (aten.mm.default, aten.native_dropout_backward.default, aten.cumsum.default, aten.view.default):
        assert overwriting_form(other) is None
    assert overwriting_form(operator.getitem) is None


@pytest.mark.parametrize("size", [(7,), (64, 33), (3, 5, 17, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_form_takes_no_memory_and_facts_hold(size: tuple[int, ...], dtype: torch.dtype) -> None:
    t, u = (torch.randn(size).to(dtype) for _ in range(2))
    for op, args in (
        (aten.add.Tensor, (t, u)),
        (aten.mul.Tensor, (t, 2.0)),
        (aten.silu.default, (t,)),
        (aten.gelu_backward.default, (t, u)),
        (aten.threshold_backward.default, (t, u, 0)),
        (aten.where.self, (t > 0, t, u)),
        (aten._softmax.default, (t, -1, False)),
        (aten._log_softmax_backward_data.default, (t, u, -1, dtype)),
    ):
        graph = fx.Graph()
        for index, each in enumerate(args):
            if isinstance(each, torch.Tensor):
                graph.placeholder(f"x{index}").meta["val"] = each
        given = iter(graph.nodes)
        node = graph.call_function(op, tuple(next(given) if isinstance(a, torch.Tensor) else a for a in args))
        node.meta["val"] = op(*args)
        from ebbtide.cost.call import call_of

        call = call_of(node)
        operand = 1 if op is aten.where.self else 0
        fact = overwriting_fact(call, operand)
        assert fact.holds()
        assert fact.bytes > 0


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.cos() * 2.0).sin().sum()


def test_costs_are_those_of_one_buffer() -> None:
    case = Case(Scaled(), (torch.randn(5000, requires_grad=True),), {})
    step, _ = captured_of(case)
    after = RULE.rewritten(step, list(RULE.candidates(step))[-1])
    calls = [call for call in after.calls if isinstance(call.target, InPlace)]
    assert calls
    assert all(cost.workspace_bytes <= 64 for cost in profile_calls(calls, "cpu").values())


def test_an_argument_is_never_written_over() -> None:
    graph = fx.Graph()
    given = graph.placeholder("given")
    same = graph.call_function(aten.view.default, (given, [6]))
    made = graph.call_function(aten.neg.default, (same,))
    graph.output(made)
    given_ = torch.ones(2, 3)
    with pytest.raises(InternalError, match="would write to an argument"):
        InPlace(graph, {made: 0})(given_)
    assert torch.equal(given_, torch.ones(2, 3))


# -- places -------------------------------------------------------------------------------------------------------


class Kept(nn.Module):
    """Nothing here dies in an elementwise op of its size but where it says so."""

    def __init__(self, how: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.how(x @ self.weight, x)


NOT_TAKEN = {
    "it is returned": lambda y, x: (y, (y + 1.0).sum()),
    "it is read twice": lambda y, x: (y + 1.0).sum() + (y - 1.0).sum(),
    "it is read twice by one op": lambda y, x: (y + y.t()).sum(),
    "the result is larger": lambda y, x: (y.unsqueeze(0) + torch.ones(3, 1, 1)).sum(),
    "the result has another type": lambda y, x: (y + torch.ones(8, 8, dtype=torch.float64)).sum(),
    "it is laid out otherwise": lambda y, x: (y.t() + torch.ones(8, 8)).sum(),
    "a half of it is read": lambda y, x: (y[:4] + 1.0).sum(),
}


@pytest.mark.parametrize("why", NOT_TAKEN)
def test_what_somebody_needs_is_not_written_over(why: str) -> None:
    step, program = captured_of(Case(Kept(NOT_TAKEN[why]), (torch.randn(8, 8),), {}))
    product = next(index for index, op in enumerate(program.ops) if op.target == "aten.mm.default")
    assert product not in [chain.head for chain in chains_of(step, lean=False)]


def test_a_lean_chain_needs_no_more_than_its_largest_op() -> None:
    step, program = captured_of(block_case())
    size = [each.bytes for each in program.buffers]
    for chain in chains_of(step, lean=True):
        ops = [program.ops[chain.head], *(program.ops[each.op] for each in chain.overwrites)]
        over = {b for op in ops for b in op.outputs} & {b for op in ops for b in op.inputs}
        together = {b for op in ops for b in (*op.inputs, *op.outputs)} - over
        alone = max(sum(size[b] for b in {*op.inputs, *op.outputs}) for op in ops)
        assert sum(size[b] for b in together) <= alone


# -- the proof ----------------------------------------------------------------------------------------------------


def rewritten_block() -> tuple[Captured, Captured]:
    step, _ = captured_of(block_case())
    candidate = list(RULE.candidates(step))[-1]
    after, _ = apply_proven(step, candidate)
    prove(after, lower(after, unplanned_schedule(after.program)))
    assert len(RULE.prove(step, after)) == len(chains_of(step, lean=False))
    return step, after


def chain_with(after: Captured, part: str) -> fx.Node:
    return next(
        n for n in after.graph.nodes if isinstance(n.target, InPlace) and part in parts_of(n.target.reference)[-1]
    )


def last_of(node: fx.Node) -> fx.Node:
    """The op of a chain that writes last."""
    assert isinstance(node.target, InPlace)
    return list(node.target.over)[-1]


def _another_operand(after: Captured) -> None:
    node = chain_with(after, "add")
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    other = next(
        each
        for each in after.graph.nodes
        if each is not node.args[0]
        and isinstance(each.meta.get("val"), torch.Tensor)
        and each.meta["val"].shape == value.shape
    )
    node.update_arg(0, other)


def _another_constant(after: Captured) -> None:
    inner = next(
        each
        for node in after.graph.nodes
        if isinstance(node.target, InPlace)
        for each in node.target.over
        if each.target is aten.mul.Tensor and isinstance(each.args[1], float)
    )
    inner.update_arg(1, 3.0)


def _another_op(after: Captured) -> None:
    last_of(chain_with(after, "add")).target = aten.sub.Tensor


def _over_something_else(after: Captured) -> None:
    node = chain_with(after, "add")
    assert isinstance(node.target, InPlace)
    inner = last_of(node)
    node.target.over[inner] = 1 - node.target.over[inner]


def _over_what_is_given(after: Captured) -> None:
    inner = last_of(chain_with(after, "add"))
    inner.replace_input_with(operands_of(inner)[0], next(n for n in inner.graph.nodes if n.op == "placeholder"))


def _read_later(after: Captured) -> None:
    """What is written over, by another op of the chain."""
    node = chain_with(after, "add")
    assert isinstance(node.target, InPlace)
    inner = last_of(node)
    over = operands_of(inner)[node.target.over[inner]]
    graph = node.target.reference
    with graph.inserting_before(graph.output_node()):
        again = graph.node_copy(inner, lambda each: each)
    assert list(over.users) == [inner, again]


def _another_part(after: Captured) -> None:
    last_of(chain_with(after, "_softmax_backward_data")).meta[PART] = "add"


def _what_is_returned(after: Captured) -> None:
    node = chain_with(after, "add")
    assert isinstance(node.target, InPlace)
    output = node.target.reference.output_node()
    output.args = (next(n for n in node.target.reference.nodes if n.op == "placeholder"),)


def _what_is_written_over(after: Captured) -> None:
    node = chain_with(after, "add")
    assert isinstance(node.target, InPlace)
    inner = last_of(node)
    node.target.reference.output_node().args = (operands_of(inner)[node.target.over[inner]],)


def _outputs_swapped(after: Captured) -> None:
    output = after.graph.output_node()
    (results,) = output.args
    swapped = list(results)  # type: ignore[arg-type]
    wanted = [i for i, each in enumerate(swapped) if isinstance(each, fx.Node) and each.meta["val"].dim() == 2]
    swapped[wanted[0]], swapped[wanted[1]] = swapped[wanted[1]], swapped[wanted[0]]
    output.args = (tuple(swapped),)


MUTANTS = [
    _another_operand,
    _another_constant,
    _another_op,
    _over_something_else,
    _over_what_is_given,
    _read_later,
    _another_part,
    _what_is_returned,
    _what_is_written_over,
    _outputs_swapped,
]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda each: each.__name__)
def test_the_proof_sees_mutants(mutate: Callable[[Captured], None]) -> None:
    step, after = rewritten_block()
    mutate(after)
    with pytest.raises(RewriteError):
        RULE.prove(step, after)


WRONG = ["it is read twice", "it is laid out otherwise", "a half of it is read"]


@pytest.mark.parametrize("why", WRONG)
def test_the_proof_sees_what_must_not_be_written_over(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finder that takes what it must not is caught by the proof, which looks for itself."""
    from ebbtide.rewrites.in_place import chains

    step, _ = captured_of(Case(Kept(NOT_TAKEN[why]), (torch.randn(8, 8),), {}))
    monkeypatch.setattr(chains._Finder, "_is_taken_over", lambda *_: True)
    found = chains._Finder(step, False, None)
    found.stays = frozenset()
    taken = list(found.chains())
    monkeypatch.setattr("ebbtide.rewrites.in_place.rule.chains_of", lambda *_, **__: taken)
    candidate = next(RULE.candidates(step))
    with pytest.raises((RewriteError, RuntimeError, UserWarning)):  # or it cannot even be written
        RULE.prove(step, RULE.rewritten(step, candidate))


# -- plans --------------------------------------------------------------------------------------------------------


def budget_between(case: Case, share: float) -> int:
    plain = ebbtide.plan(case.model, case.args, case.kwargs, budget="100%", options=ebbtide.Options(progress=None))
    return int(plain.smallest_bytes + share * (plain.baseline_peak_bytes - plain.smallest_bytes))


def history(model: nn.Module, case: Case, *, retained: bool = False) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for _ in range(3):
        model.zero_grad()
        loss = model(*case.args)
        if retained:
            loss.backward(retain_graph=True)
        loss.backward()
        found += [loss.detach().clone(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
    return found


def test_a_step_below_what_the_captured_one_needs_trains_as_eager() -> None:
    case = block_case(600)
    plain = ebbtide.plan(case.model, case.args, budget="100%", options=ebbtide.Options(progress=None))
    least = ebbtide.plan(
        case.model, case.args, budget=plain.smallest_bytes, options=ebbtide.Options(rewrites="in-place", progress=None)
    )
    assert least.smallest_bytes < plain.floor_bytes
    budget = (least.smallest_bytes + plain.smallest_bytes) // 2
    model = ebbtide.fit(block_case(600).model, budget, progress=None, options=ebbtide.Options(rewrites="in-place"))
    assert all(map(torch.equal, history(model, case), history(block_case(600).model, case)))
    plan, step = ebbtide.plan_of(model), ebbtide.step_of(model)
    assert plan is not None
    assert step is not None
    assert plan.rewritten is not None
    assert {each.rule for each in plan.rewritten.rewrites} == {"in-place"}
    assert step.measured_above_bytes is not None
    assert plan.resident_bytes + step.measured_above_bytes <= budget


def test_a_graph_that_is_retained_has_the_same_bits_and_says_what_it_takes() -> None:
    case = block_case()
    expected = history(block_case().model, case, retained=True)
    plain = ebbtide.plan(case.model, case.args, budget="100%", options=ebbtide.Options(progress=None))
    model = ebbtide.fit(
        block_case().model, plain.baseline_peak_bytes - 1, progress=None, options=ebbtide.Options(rewrites="in-place")
    )
    with pytest.warns(UserWarning, match="retain"):
        found = history(model, case, retained=True)
    assert all(map(torch.equal, found, expected))


def test_a_plan_says_so_and_comes_back_from_its_file(tmp_path: Path) -> None:
    case = block_case(600)
    budget = budget_between(case, 0.0)
    plan = ebbtide.plan(
        case.model, case.args, budget=budget, options=ebbtide.Options(rewrites="in-place", progress=None)
    )
    assert plan.rewritten is not None
    form = plan.rewritten.rewrites[0].form
    assert f"in-place: {form} (" in plan.details
    again = ebbtide.Plan.load(plan.save(tmp_path / "plan.json"))
    assert (again.rewritten, again.fingerprint) == (plan.rewritten, plan.fingerprint)
    model = ebbtide.fit(block_case(600).model, again, progress=None)
    assert all(map(torch.equal, history(model, case), history(block_case(600).model, case)))


def test_what_does_not_hold_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = block_case(600)
    step, program = captured_of(case)
    candidate = next(RULE.candidates(step))

    def all_but_adds(found: Any, device: str) -> dict[str, bool]:
        return {each.signature: "add.Tensor" not in each.signature for each in found}

    monkeypatch.setattr(choices, "measured", all_but_adds)
    costed = Choice(step, candidate).costed("cpu", program)
    assert costed is not None
    kept = {each.facts[0].partition(" ")[0] for each in costed.rewrites}
    assert "add.Tensor" not in kept
    assert len(kept) > 1
    monkeypatch.setattr(choices, "measured", lambda found, device: dict.fromkeys((f.signature for f in found), None))
    assert Choice(step, candidate).costed("cpu", program) is None


def test_a_plan_for_another_machine_assumes_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_measured", lambda *_: pytest.fail("measured for a machine that is not here"))
    case = block_case(600)
    options: dict[str, Any] = {"machine": "h100-80gb", "progress": None}
    plain = ebbtide.plan(case.model, case.args, budget="100%", options=ebbtide.Options(**options))
    plan = ebbtide.plan(
        case.model, case.args, budget=plain.smallest_bytes, options=ebbtide.Options(rewrites="in-place", **options)
    )
    assert plan.rewritten is not None
    assert "until fit measures it" in plan.details


def test_a_rewrite_of_another_step_is_refused() -> None:
    step, _ = captured_of(block_case(600))
    rewrite = next(RULE.candidates(step))[0]
    assert Rewrite.from_json(rewrite.to_json()) == rewrite
    other, _ = captured_of(Case(Scaled(), (torch.randn(50, requires_grad=True),), {}))
    with pytest.raises(LookupError, match="no op at"):
        choices.choice_of(other, [rewrite])

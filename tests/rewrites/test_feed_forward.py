"""Feed-forward layers in slices: which are found, with which bits, at which peak, and the proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import ebbtide
from ebbtide import options
from ebbtide._api.estimate import capture_program
from ebbtide.capture.claims import RewriteError
from ebbtide.capture.joint import Captured
from ebbtide.errors import BudgetError
from ebbtide.lower.lowering import lower
from ebbtide.lower.proof import prove
from ebbtide.rewrites import choices
from ebbtide.rewrites.choices import apply_proven
from ebbtide.rewrites.sliced.calls import InSlices, calls_of
from ebbtide.rewrites.sliced.facts import slice_facts
from ebbtide.rewrites.sliced.feed_forward import FeedForward
from ebbtide.rewrites.sliced.regions import find_regions
from ebbtide.rewrites.sliced.rule import FEED_FORWARD as RULE
from ebbtide.step.unplanned import unplanned_schedule
from sliced_steps import (
    assert_captured_bits_and_predicted_bytes,
    assert_estimated_workspace_is_the_measured_one,
    assert_trains_as_eager_within,
)

aten = torch.ops.aten


class Adapted(nn.Module):
    """A frozen linear layer and a trained one of low rank beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(inputs, 16, bias=False), nn.Linear(16, outputs, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x) * 0.5


class Layers(nn.Module):
    """A few feed-forward layers, each added to what it reads."""

    def __init__(self, kind: str, width: int = 33, hidden: int = 197, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        linear = Adapted if kind == "adapters" else nn.Linear
        self.first = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.up, self.gate = (nn.ModuleList(linear(width, hidden) for _ in range(layers)) for _ in range(2))
        self.down = nn.ModuleList(linear(hidden, width) for _ in range(layers))
        if kind == "frozen":
            for each in (self.up, self.gate, self.down):
                each.requires_grad_(False)

    def inner(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        up = self.up[layer](x)
        if self.kind == "gelu":
            return F.gelu(up)
        if self.kind == "softplus":  # which torch has not tagged as elementwise
            return F.softplus(up)
        if self.kind == "by hand":
            return 0.5 * up * (1.0 + torch.tanh(0.8 * (up + 0.04 * torch.pow(up, 3.0))))
        return F.silu(self.gate[layer](x)) * up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer, norm in enumerate(self.norms):
            x = x + self.down[layer](self.inner(layer, norm(x)))
        return x.float().square().mean()


KINDS = {"gelu": 3, "softplus": 3, "by hand": 3, "gated": 3, "frozen": 2, "adapters": 3}
"""And the calls of a layer."""


def layers_of(kind: str, dtype: torch.dtype = torch.float32) -> Layers:
    """Of as many hidden values as fill vectors, so that columns may be cut (``test_rests``)."""
    return Layers(kind, hidden=192).to(dtype)


def data(dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """Of several threads the parts fill vectors too (``test_rests``)."""
    length = 173 if torch.get_num_threads() == 1 else 172
    return torch.randn(3, length, 33, generator=torch.Generator().manual_seed(seed)).to(dtype)


def captured_of(model: nn.Module, *args: torch.Tensor) -> tuple[Captured, ebbtide.Program]:
    step, program, _ = capture_program(model, args, {})
    return step, program


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def history(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """Losses and gradients of three steps on other data each."""
    sgd = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    found: list[torch.Tensor] = []
    for i in range(3):
        loss = model(data(dtype, i))
        loss.backward()
        found += [loss.detach().clone(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        sgd.step()
        sgd.zero_grad()
    return found


def least(model: nn.Module, dtype: torch.dtype) -> int:
    """The smallest budget of the captured step."""
    ebbtide.fit(model, 1, progress=None, options=ebbtide.Options(rewrites="none"))
    with pytest.raises(BudgetError) as refused:
        model(data(dtype))
    assert refused.value.smallest_bytes is not None
    return refused.value.smallest_bytes


# -- training -----------------------------------------------------------------------------------------------------


TRAINED = [
    ("gelu", 1, torch.float32),
    ("frozen", 1, torch.bfloat16),
    *(
        pytest.param(*each, marks=pytest.mark.long)
        for each in (
            ("adapters", 1, torch.float32),
            ("gated", 2, torch.float32),
            ("by hand", 1, torch.float32),
            ("gated", 1, torch.bfloat16),
            ("frozen", 1, torch.float32),
            ("gelu", 2, torch.bfloat16),
        )
    ),
]


@pytest.mark.parametrize(("kind", "count", "dtype"), TRAINED)
def test_trains_as_eager_below_the_captured_steps_least(
    kind: str, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(options._RULES, "all", (RULE.name,))  # and nothing that might do as well
    with threads(count):
        budget = int((0.75 if kind == "adapters" else 0.9) * least(layers_of(kind, dtype), dtype))
        made = partial(layers_of, kind, dtype)
        assert_trains_as_eager_within(RULE, made, data(dtype), budget, lambda model: history(model, dtype))


@pytest.mark.parametrize("kind", ["gelu", "softplus", "adapters"])
def test_each_way_has_the_captured_bits_and_the_predicted_bytes(kind: str) -> None:
    model = layers_of(kind)
    captured = captured_of(model, data())
    candidates = RULE.candidates(captured[0])
    assert_captured_bits_and_predicted_bytes(RULE, model, data(), captured, candidates, KINDS[kind])


def test_estimated_workspace_is_the_measured_one() -> None:
    assert_estimated_workspace_is_the_measured_one(RULE, captured_of(layers_of("gated"), data()))


# -- slices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_where_facts_hold_slices_have_the_bits_of_the_whole(dtype: torch.dtype, count: int) -> None:
    drawing = torch.Generator().manual_seed(5)

    def drawn(shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        return torch.randn(extent, generator=drawing).to(dtype).as_strided(shape, stride)

    held = 0
    with threads(count):
        for rows, width, hidden in ((97, 33, 131), (161, 40, 192)):
            model = Layers("gated", width, hidden, layers=1).to(dtype)
            step, _ = captured_of(model, torch.zeros(rows, width, dtype=dtype))
            (region,) = find_regions(step, FeedForward)[0]
            for call in calls_of(region):
                given = [drawn(tuple(v.shape), tuple(v.stride())) for v in (each.meta["val"] for each in call.inputs)]
                whole = call.target(10**6, *given)
                for size in (64, 100, 128):
                    if all(fact.holds() for fact in slice_facts(call, size)):
                        held += 1
                        assert all(map(torch.equal, call.target(size, *given), whole))
    assert held >= 9


# -- what is found ------------------------------------------------------------------------------------------------


class Dropped(Layers):
    def inner(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().inner(layer, x), 0.1)


class Read(Layers):
    def inner(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        y = super().inner(layer, x)
        return y + y.softmax(-1)


@pytest.mark.parametrize(("made", "why"), [(Dropped, "read"), (Read, "softmax")])
def test_what_looks_alike_is_left_with_the_reason(made: type[Layers], why: str) -> None:
    step, _ = captured_of(made("gelu"), data())
    assert find_regions(step, FeedForward)[0] == []
    assert list(RULE.candidates(step)) == []
    assert why in RULE.skipped(step)[0].why


def test_layers_that_pin_nothing_are_left_alone() -> None:
    step, _ = captured_of(Layers("gelu", width=300, hidden=310), torch.zeros(8, 300))
    assert len(find_regions(step, FeedForward)[0]) == 1
    assert list(RULE.candidates(step)) == []


def test_a_fact_that_fails_is_told_and_the_step_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "measured", lambda found, device: dict.fromkeys((f.signature for f in found), False))
    found = ebbtide.doctor(layers_of("gated"), (data(),), options=ebbtide.Options(rewrites="all", progress=None))
    assert found.rewrites
    tiled = [each for each in found.rewrites if "feed-forward" in each.what]
    assert tiled
    assert all("not the bits of the whole here" in each.why_not for each in tiled)
    budget = int(0.9 * least(layers_of("gated"), torch.float32))
    with pytest.raises(BudgetError):
        ebbtide.fit(layers_of("gated"), budget, progress=None, options=ebbtide.Options(rewrites="all"))(data())


def test_a_plan_for_a_card_lists_what_it_assumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(options._RULES, "all", (RULE.name,))
    case = Layers("gelu"), (data(),)
    captured = ebbtide.plan(
        *case, budget="200%", machine="rtx4090-24gb", options=ebbtide.Options(rewrites="none", progress=None)
    )
    above = captured.smallest_bytes - captured.resident_bytes - captured.reserve_bytes
    budget = captured.smallest_bytes - above // 10
    plan = ebbtide.plan(
        *case, budget=budget, machine="rtx4090-24gb", options=ebbtide.Options(rewrites="all", progress=None)
    )
    assert plan.rewritten is not None
    assert "takes for granted, until fit measures it," in plan.details
    assert "columns at a time of" in plan.details


# -- the proof ----------------------------------------------------------------------------------------------------


def sliced() -> tuple[Captured, Captured]:
    step, _ = captured_of(layers_of("gated"), data())
    after, _ = apply_proven(step, next(iter(RULE.candidates(step))))
    prove(after, lower(after, unplanned_schedule(after.program)))
    return step, after


def call_by(after: Captured, axis: str) -> fx.Node:
    return next(n for n in after.graph.nodes if isinstance(n.target, InSlices) and f"by_{axis}" in str(n.target))


def _inner(node: fx.Node, target: object) -> fx.Node:
    assert isinstance(node.target, InSlices)
    return next(each for each in node.target.reference.nodes if each.target is target)


def _another_operand(after: Captured) -> None:
    node = call_by(after, "rows")
    node.args = (*node.args[:2], *reversed(node.args[2:]))


def _another_axis(after: Captured) -> None:
    target = call_by(after, "rows").target
    assert isinstance(target, InSlices)
    target.inputs = tuple(None if each == 0 else each for each in target.inputs)


def _a_sum_taken_apart(after: Captured) -> None:
    """The gradient of a weight from slices of rows."""
    target = call_by(after, "columns").target
    assert isinstance(target, InSlices)
    target.inputs = tuple(0 if each is None else None for each in target.inputs)


def _put_together_otherwise(after: Captured) -> None:
    target = call_by(after, "rows").target
    assert isinstance(target, InSlices)
    target.outputs = tuple(1 - each for each in target.outputs)


def _another_op(after: Captured) -> None:
    _inner(call_by(after, "rows"), aten.silu.default).target = aten.relu.default


def _another_place(after: Captured) -> None:
    inner = _inner(call_by(after, "rows"), aten.mul.Tensor)
    inner.args = (inner.args[0], inner.args[0])


def _a_part_left_out(after: Captured) -> None:
    inner = _inner(call_by(after, "rows"), aten.silu.default)
    inner.replace_all_uses_with(inner.all_input_nodes[0])


def _other_results(after: Captured) -> None:
    node = call_by(after, "columns")
    assert isinstance(node.target, InSlices)
    output = node.target.reference.output_node()
    output.args = (tuple(reversed(output.args[0])),)  # type: ignore[arg-type]


MUTANTS = [
    _another_operand,
    _another_axis,
    _a_sum_taken_apart,
    _put_together_otherwise,
    _another_op,
    _another_place,
    _a_part_left_out,
    _other_results,
]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda each: each.__name__)
def test_the_proof_sees_mutants(mutate: Callable[[Captured], None]) -> None:
    step, after = sliced()
    mutate(after)
    with pytest.raises(RewriteError):
        RULE.prove(step, after)

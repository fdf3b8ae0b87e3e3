"""Attention by products and a softmax, in slices: what is found, with which bits, at which peak, and the proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

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
from ebbtide.rewrites.sliced.attention import Attention
from ebbtide.rewrites.sliced.axes import SPREAD, Axis
from ebbtide.rewrites.sliced.calls import InSlices, calls_of
from ebbtide.rewrites.sliced.facts import slice_facts
from ebbtide.rewrites.sliced.regions import find_regions
from ebbtide.rewrites.sliced.rule import ATTENTION as RULE
from ebbtide.rewrites.sliced.rule import FEED_FORWARD
from ebbtide.step.unplanned import unplanned_schedule
from sliced_steps import (
    assert_captured_bits_and_predicted_bytes,
    assert_estimated_workspace_is_the_measured_one,
    assert_trains_as_eager_within,
)

aten = torch.ops.aten
HEADS, WIDTH = 4, 12


class Attends(nn.Module):
    """Self-attention by hand, added to what it reads; a few layers of it."""

    def __init__(self, kind: str, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH) for _ in range(layers))
        self.bias = nn.Parameter(torch.zeros(HEADS, 1, 1)) if kind == "biased" else None

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        length = q.shape[-2]
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        if self.kind == "capped":
            scores = 5.0 * torch.tanh(scores / 5.0)
        if self.kind == "padded":  # a mask of its own for each sequence
            return scores + torch.where(torch.arange(length) < length - 3 - torch.arange(3)[:, None], 0.0, -1e9)[
                :, None, None
            ].to(q.dtype)
        if self.kind == "sloped":  # and one for each head
            slopes = torch.arange(1.0, HEADS + 1)[:, None, None] * torch.arange(length)
            return (scores + slopes.to(q.dtype)).masked_fill(later, float("-inf"))
        return scores.masked_fill(later, float("-inf"))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.kind == "math":
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = self.scores(q, k)
        if self.kind == "upcast":
            weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        else:
            weights = F.softmax(scores, dim=-1)
        if self.kind == "dropped":
            weights = F.dropout(weights, 0.2, self.training)
        return weights @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = (each.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in layer(x).chunk(3, -1))
            x = x + self.attend(q, k, v).transpose(1, 2).flatten(2)
        return x.float().square().mean()


class Module(nn.Module):
    """torch's own layer, which asks for weights and so multiplies by hand, in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        return self.inner(x, x, x, attn_mask=later)[0].float().square().mean()


KINDS = ("plain", "capped", "padded", "sloped", "upcast", "dropped", "math", "module")


def made(kind: str, dtype: torch.dtype = torch.float32, layers: int = 1) -> nn.Module:
    return (Module() if kind == "module" else Attends(kind, layers)).to(dtype)


def data(dtype: torch.dtype = torch.float32, seed: int = 1, length: int = 97) -> torch.Tensor:
    return torch.randn(3, length, HEADS * WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
    """Losses, gradients and random states of three steps on other data each."""
    torch.manual_seed(7)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for i in range(3):
        loss = model(data(dtype, i))
        loss.backward()
        found += [loss.detach().clone(), torch.get_rng_state()]
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
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
    ("plain", 1, torch.float32),
    ("dropped", 1, torch.float32),
    ("upcast", 1, torch.bfloat16),
    *(
        pytest.param(*each, marks=pytest.mark.long)
        for each in (
            ("capped", 1, torch.float32),
            ("padded", 2, torch.float32),
            ("sloped", 1, torch.float32),
            ("math", 1, torch.float32),
            ("module", 1, torch.float32),
            ("plain", 2, torch.bfloat16),
        )
    ),
]


@pytest.mark.parametrize(("kind", "count", "dtype"), TRAINED)
def test_trains_as_eager_below_the_captured_steps_least(
    kind: str, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(options._RULES, "all", (RULE.name,))  # and nothing that might do as well
    with threads(count):
        budget = int((0.9 if kind == "dropped" else 0.8) * least(made(kind, dtype), dtype))
        model_of = partial(made, kind, dtype)
        assert_trains_as_eager_within(RULE, model_of, data(dtype), budget, lambda model: history(model, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_each_way_has_the_captured_bits_and_the_predicted_bytes(kind: str) -> None:
    model = made(kind)
    captured = captured_of(model, data())
    candidates = list(RULE.candidates(captured[0]))
    assert len(candidates) >= 2
    ends = (candidates[0], candidates[-1])
    assert_captured_bits_and_predicted_bytes(RULE, model, data(), captured, ends, calls=2)


def test_estimated_workspace_is_the_measured_one() -> None:
    assert_estimated_workspace_is_the_measured_one(RULE, captured_of(made("plain"), data()))


# -- slices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_where_facts_hold_slices_have_the_bits_of_the_whole(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where entries begin at other addresses in the whole than slices do: MKL then adds in another order."""
    drawing = torch.Generator().manual_seed(5)

    def drawn(value: torch.Tensor) -> torch.Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        made = torch.randn(extent, generator=drawing).to(torch.float32 if value.dtype is torch.bool else value.dtype)
        return (made > 0 if value.dtype is torch.bool else made).as_strided(value.shape, value.stride())

    held = 0
    with threads(count):
        for length, width in ((33, 12), (67, 12), (128, 12), (41, 8), (43, 8), (64, 8)):
            monkeypatch.setitem(globals(), "WIDTH", width)
            step, _ = captured_of(made("sloped", dtype), data(dtype, length=length))
            (region,) = find_regions(step, Attention)[0]
            for call in calls_of(region):
                given = [drawn(each.meta["val"]) for each in call.inputs]
                captured = fx.Graph()
                known = {each: captured.placeholder(f"given_{i}") for i, each in enumerate(call.inputs)}
                for each in _behind(call.results, known):
                    known[each] = captured.node_copy(each, known.__getitem__)
                captured.output(tuple(known[each] for each in call.results))
                whole = fx.GraphModule(nn.Module(), captured)(*given)
                for size in (1, 2, 3):
                    if all(fact.holds() for fact in slice_facts(call, size)):
                        held += 1
                        assert all(map(torch.equal, call.target(size, *given), whole))
    assert held >= 9


def _behind(results: tuple[fx.Node, ...], given: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """All that makes ``results`` of ``given``, in captured order."""
    found: set[fx.Node] = set()
    pending = list(results)
    while pending:
        node = pending.pop()
        if node not in found and node not in given:
            found.add(node)
            pending += node.all_input_nodes
    return [each for each in results[0].graph.nodes if each in found]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_parts_are_those_of_the_whole_however_it_is_spread(size: int) -> None:
    leading = (2, 3, 5)
    whole = torch.arange(30.0)[:, None, None].expand(30, 2, 2)
    spread = whole.reshape(*leading, 2, 2)
    seen: list[int] = []
    entries = Axis("entries", 0, 3, leading, even=False)
    for piece in entries.pieces(size):
        part = entries.part(whole, 0, piece)
        assert 1 <= len(part) <= size
        seen += part[:, 0, 0].int().tolist()
        assert torch.equal(entries.part(spread, SPREAD, piece), part)
        assert entries.part(whole, None, piece) is whole
        for shape in ((1, 3, 5), (2, 1, 1), (2, 3, 1), (3, 1), (5,), (1,)):
            mask = torch.randn(*shape, 2, 1)
            mine = part + entries.part(mask, SPREAD, piece)
            assert torch.equal(mine, entries.part((spread + mask).reshape(30, 2, 2), 0, piece))
    assert seen == list(range(30))


# -- what is found ------------------------------------------------------------------------------------------------


class Returned(Attends):
    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = (each.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in self.layers[0](x).chunk(3, -1))
        weights = F.softmax(self.scores(q, k), dim=-1)
        return (weights @ v).square().mean(), weights


class Biased(Attends):
    """Whose bias has a gradient: a sum over all queries and keys."""

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        return super().scores(q, k) + self.bias


class ByHand(Attends):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = F.softmax(self.scores(q, k), dim=-1)
        return (weights / weights.sum(-1, keepdim=True)) @ v


@pytest.mark.parametrize(
    ("model", "why"), [(Returned("plain"), "returned"), (Biased("biased"), "sum"), (ByHand("plain"), "sum")]
)
def test_what_looks_alike_is_left_with_the_reason(model: nn.Module, why: str) -> None:
    step, _ = captured_of(model, data())
    assert find_regions(step, Attention)[0] == []
    assert list(RULE.candidates(step)) == []
    assert why in RULE.skipped(step)[0].why


class BesideMore(Attends):
    """Of which something else takes more."""

    def __init__(self) -> None:
        super().__init__("plain")
        self.more = nn.Linear(HEADS * WIDTH, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in self.layers[0](x).chunk(3, -1))
        return F.gelu(self.more(self.attend(q, k, v).transpose(1, 2).flatten(2))).square().mean()


def test_attention_that_pins_nothing_is_left_alone() -> None:
    step, _ = captured_of(BesideMore(), data(length=16))
    assert len(find_regions(step, Attention)[0]) == 1
    assert list(RULE.candidates(step)) == []


def test_each_layer_is_a_region_of_its_own_though_they_share_a_mask() -> None:
    step, _ = captured_of(made("plain", layers=3), data())
    assert [sum(len(nodes) for _, nodes in each.results) for each in find_regions(step, Attention)[0]] == [4, 4, 4]


class Block(Attends):
    """Attention by hand, then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__("plain")
        self.up, self.down = nn.Linear(HEADS * WIDTH, 256), nn.Linear(256, HEADS * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = (each.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in layer(x).chunk(3, -1))
            x = x + self.attend(q, k, v).transpose(1, 2).flatten(2)
        return (x + self.down(F.gelu(self.up(x)))).float().square().mean()


def test_layers_of_both_kinds_are_rewritten_in_one_step() -> None:
    """The second rule's proof takes the first one's calls for what they are by then: ops of the step before it."""
    step, _ = captured_of(Block(), data())
    both = [*next(iter(RULE.candidates(step))), *next(iter(FEED_FORWARD.candidates(step)))]
    after, replaced = apply_proven(step, both)
    assert len(calls(after)) > len(calls(apply_proven(step, next(iter(RULE.candidates(step))))[0]))
    assert len(replaced) == len(calls(after))


def test_a_fact_that_fails_is_told_and_the_step_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "measured", lambda found, device: dict.fromkeys((f.signature for f in found), False))
    found = ebbtide.doctor(made("plain"), (data(),), options=ebbtide.Options(progress=None))
    sliced = [each for each in found.rewrites if each.what.startswith(RULE.name)]
    assert sliced
    assert all("not the bits of the whole here" in each.why_not for each in sliced)
    budget = int(0.8 * least(made("plain"), torch.float32))
    with pytest.raises(BudgetError):
        ebbtide.fit(made("plain"), budget, progress=None)(data())


# -- the proof ----------------------------------------------------------------------------------------------------


def sliced() -> tuple[Captured, Captured]:
    step, _ = captured_of(made("padded"), data())
    after, _ = apply_proven(step, next(iter(RULE.candidates(step))))
    prove(after, lower(after, unplanned_schedule(after.program)))
    return step, after


def calls(after: Captured) -> list[fx.Node]:
    return [each for each in after.graph.nodes if isinstance(each.target, InSlices)]


def _inner(node: fx.Node, target: object) -> fx.Node:
    assert isinstance(node.target, InSlices)
    return next(each for each in node.target.reference.nodes if each.target is target)


def _another_operand(after: Captured) -> None:
    node = calls(after)[0]
    node.args = (node.args[0], node.args[2], node.args[1], *node.args[3:])


def _another_mask(after: Captured) -> None:
    """Of the same shape: that of the scores is read as values by somebody else."""
    node = calls(after)[1]
    flat = [i for i, cut in enumerate(node.target.inputs) if cut == 0]  # type: ignore[union-attr]
    args = list(node.args)
    args[1 + flat[0]], args[1 + flat[-1]] = args[1 + flat[-1]], args[1 + flat[0]]
    node.args = tuple(args)


def _entries_in_other_places(after: Captured) -> None:
    target = calls(after)[0].target
    assert isinstance(target, InSlices)
    target.axis = replace(target.axis, leading=tuple(reversed(target.axis.leading)))


def _a_mask_for_all(after: Captured) -> None:
    target = calls(after)[0].target
    assert isinstance(target, InSlices)
    target.inputs = tuple(None if each == SPREAD else each for each in target.inputs)


def _an_operand_for_all(after: Captured) -> None:
    target = calls(after)[0].target
    assert isinstance(target, InSlices)
    target.inputs = (None, *target.inputs[1:])


def _over_the_queries(after: Captured) -> None:
    inner = _inner(calls(after)[0], aten._softmax.default)
    inner.args = (inner.args[0], 1, *inner.args[2:])


def _swapped_once_more(after: Captured) -> None:
    """Probabilities of which queries and keys are as many."""
    node = calls(after)[0]
    assert isinstance(node.target, InSlices)
    inner = [each for each in node.target.reference.nodes if each.target is aten.bmm.default][-1]
    with node.target.reference.inserting_before(inner):
        swapped = node.target.reference.call_function(aten.transpose.int, (inner.args[0], 1, 2))
    inner.args = (swapped, *inner.args[1:])


def _swapped_with_entries(after: Captured) -> None:
    inner = _inner(calls(after)[1], aten.transpose.int)
    inner.args = (inner.args[0], 0, 2)


def _another_op(after: Captured) -> None:
    _inner(calls(after)[0], aten.add.Tensor).target = aten.sub.Tensor


def _another_constant(after: Captured) -> None:
    inner = _inner(calls(after)[0], aten.div.Tensor)
    inner.args = (inner.args[0], 2.0)


def _a_part_left_out(after: Captured) -> None:
    inner = _inner(calls(after)[0], aten.add.Tensor)
    inner.replace_all_uses_with(inner.all_input_nodes[0])


def _other_results(after: Captured) -> None:
    node = calls(after)[1]
    assert isinstance(node.target, InSlices)
    output = node.target.reference.output_node()
    output.args = (tuple(reversed(output.args[0])),)  # type: ignore[arg-type]


MUTANTS = [
    _another_operand,
    _another_mask,
    _entries_in_other_places,
    _a_mask_for_all,
    _an_operand_for_all,
    _over_the_queries,
    _swapped_once_more,
    _swapped_with_entries,
    _another_op,
    _another_constant,
    _a_part_left_out,
    _other_results,
]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda each: each.__name__)
def test_the_proof_sees_mutants(mutate: Callable[[Captured], None]) -> None:
    step, after = sliced()
    mutate(after)
    with pytest.raises(RewriteError):
        RULE.prove(step, after)

"""A rule for a new op, as ``CONTRIBUTING.md`` says: a row of the table, and found, facts, call and proof follow.

A copy is for an op whose row is in the table: it has its own model and :data:`ROWS`, and leaves out ``with_rows``.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx, nn

from ebbtide._api.estimate import capture_program
from ebbtide.capture.claims import RewriteError
from ebbtide.capture.joint import Captured
from ebbtide.rewrites.sliced.attention import Attention
from ebbtide.rewrites.sliced.axes import MIXED_DIMENSION, can_be_cut
from ebbtide.rewrites.sliced.calls import InSlices, calls_of
from ebbtide.rewrites.sliced.facts import slice_facts
from ebbtide.rewrites.sliced.regions import find_regions
from ebbtide.rewrites.sliced.rule import ATTENTION

aten = torch.ops.aten
HEADS, WIDTH = 4, 12
SIZES = (1, 2, 3, 4, 6)


class Scored(nn.Module):
    """Attention whose weights are made of the scores in some other way than by a softmax alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in self.layer(x).chunk(3, -1))
        return (self.weights(q @ k.transpose(-2, -1) / math.sqrt(WIDTH)) @ v).square().mean()


class ByLogarithms(Scored):
    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.log_softmax(-1).exp()


class BySums(Scored):
    """Its backward is ``flip(dims=[d])``, which names the dimension in a list."""

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        return (scores * scores).cumsum(-1)


ROWS: dict[type[Scored], dict[object, int]] = {
    ByLogarithms: {aten._log_softmax.default: 1, aten._log_softmax_backward_data.default: 2},
    BySums: {aten.cumsum.default: 1, aten.flip.default: 1},
}
"""Each op mixes the dimension that it is told at this position, and no other one."""


def captured(model: type[Scored]) -> Captured:
    x = torch.randn(3, 97, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))
    return capture_program(model(), (x,), {})[0]


@pytest.fixture(params=ROWS, ids=lambda each: each.__name__)
def model(request: pytest.FixtureRequest) -> type[Scored]:
    return request.param


@pytest.fixture
def with_rows(model: type[Scored], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the edit of ``axes.py``."""
    for target, position in ROWS[model].items():
        monkeypatch.setitem(MIXED_DIMENSION, target, position)


def test_without_a_row_it_is_no_part_of_a_region(model: type[Scored], monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ROWS[model]:
        monkeypatch.delitem(MIXED_DIMENSION, target, raising=False)
    assert ATTENTION.skipped(captured(model)) == []  # no op of the table is there: nobody takes it for an attention
    assert list(ATTENTION.candidates(captured(model))) == []


@pytest.mark.usefixtures("with_rows")
def test_a_row_is_enough_to_find_it_to_prove_it_and_to_compute_the_same_bits(model: type[Scored]) -> None:
    """Where all facts of a size hold, as plans ask before they use it.

    Facts are of every op of a call, and some sizes fail by ops that are not the new one: what vectors leave over at the
    end of a slice may have other last bits.
    """
    step = captured(model)
    regions = find_regions(step, Attention)[0]
    assert len(regions) == 1, ATTENTION.skipped(step) or "nothing looks like one: is a row missing?"
    (region,) = regions
    assert ROWS[model].keys() <= {each.target for each in region.members}
    for candidate in ATTENTION.candidates(step):
        assert len(ATTENTION.prove(step, ATTENTION.rewritten(step, candidate))) == 2
    for call in calls_of(region):
        given = [torch.randn(each.meta["val"].shape).as_strided(*_layout(each)) for each in call.inputs]
        whole = call.target(10**6, *given)
        failed = {size: [fact.says for fact in slice_facts(call, size) if not fact.holds()] for size in SIZES}
        held = [size for size in SIZES if not failed[size]]
        assert held, failed
        for size in held:
            assert all(map(torch.equal, call.target(size, *given), whole))


def _layout(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    value = node.meta["val"]
    return tuple(value.shape), tuple(value.stride())


@pytest.mark.usefixtures("with_rows")
def test_what_a_row_says_is_what_the_proof_asks(model: type[Scored]) -> None:
    step = captured(model)
    op, position = next(iter(ROWS[model].items()))
    node, *_ = step.graph.find_nodes(op="call_function", target=op)
    assert can_be_cut(node, 0, rank=3)
    assert can_be_cut(node, 1, rank=3)
    assert not can_be_cut(node, 2, rank=3)
    after = ATTENTION.rewritten(step, next(ATTENTION.candidates(step)))
    call = next(each.target for each in after.graph.nodes if isinstance(each.target, InSlices))
    inner = next(each for each in call.reference.nodes if each.target is op)
    other = [1] if isinstance(inner.args[position], list) else 1
    inner.args = (*inner.args[:position], other, *inner.args[position + 1 :])
    with pytest.raises(RewriteError, match="no call of the captured step"):
        ATTENTION.prove(step, after)

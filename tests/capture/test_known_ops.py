"""A copy of a step is read as the step was: an op is taken over only where nothing about it has changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from ebbtide.capture.joint import Captured, reread
from ebbtide.capture.known_ops import KnownOps
from ebbtide.capture.offline import capture
from ebbtide.rewrites.choices import Choice
from ebbtide.rewrites.rules import RULES
from ebbtide.torch_seams.trees import tree_leaves


class Block(nn.Module):
    """Something for every rule: a head, a feed-forward layer, attention, and what dies."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(331, 16), nn.Linear(16, 48)
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 331, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        x = nn.functional.dropout(x + self.down(torch.nn.functional.gelu(self.up(x))), 0.1)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.fixture(scope="module")
def step() -> Captured:
    ids = torch.arange(64).reshape(2, 32)
    return capture(Block(), (ids,), {}, name="block", granularity_bytes=64, context={"device": "cpu"})


def test_every_rewritten_step_is_read_as_if_nothing_were_known(step: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = [each for rule in RULES for each in rule.candidates(step)]
    assert {each.rule for candidate in candidates for each in candidate} >= {"linear-cross-entropy", "in-place"}
    known = [Choice(step, candidate).rewritten for candidate in candidates]
    monkeypatch.setattr(KnownOps, "look_up", lambda *_: None)
    for candidate, mine in zip(candidates, known, strict=True):
        anew = Choice(step, candidate).rewritten
        assert mine.program == anew.program
        assert [(each.signature, each.outputs) for each in mine.calls] == [
            (each.signature, each.outputs) for each in anew.calls
        ]


def _another_value(node: fx.Node) -> None:
    node.meta = {**node.meta, "val": node.meta["val"].clone()}


def _another_value_to_read(node: fx.Node) -> None:
    _another_value(node.all_input_nodes[0])


def _another_constant(node: fx.Node) -> None:
    node.args = (*node.args[:1], -2, *node.args[2:])


def _another_target(node: fx.Node) -> None:
    node.target = torch.ops.aten._log_softmax.default


@pytest.mark.parametrize("change", [_another_value, _another_value_to_read, _another_constant, _another_target])
def test_what_has_changed_is_not_taken_over(step: Captured, change: Callable[[fx.Node], None]) -> None:
    graph = fx.Graph(owning_module=step.graph.owning_module)
    graph.output(tuple(tree_leaves(graph.graph_copy(step.graph, nodes := {}))))  # type: ignore[arg-type]
    graph.output_node().meta = dict(step.graph.output_node().meta)
    known = KnownOps(zip(step.op_nodes, step.program.ops, step.calls, strict=True))
    (old,) = [each for each in step.op_nodes if each.target is torch.ops.aten._softmax.default]
    assert reread(step, graph).program == step.program
    assert known.look_up(nodes[old]) is not None
    change(nodes[old])
    assert known.look_up(nodes[old]) is None

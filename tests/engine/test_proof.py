"""The static proof accepts what the lowering makes of any schedule and rejects every tampering."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from ebbtide.capture.joint import Captured
from ebbtide.capture.offline import capture
from ebbtide.lower.lowering import STATE_OF, Lowered, lower
from ebbtide.lower.proof import ProofError, prove
from ebbtide.lower.targets import read_state, replay
from ebbtide.step.unplanned import unplanned_schedule
from random_schedule import random_schedule

ATEN = torch.ops.aten


class Net(nn.Module):
    """Two dropouts, an addition, a division, two norms, of which one has several outputs, and a changing buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * self.seen
        self.seen.add_(1.0)
        x = F.dropout(F.gelu(self.first(x)), 0.1) + scaled
        y = F.dropout(F.softmax(self.second(F.layer_norm(x, (8,))), dim=-1), 0.2)
        return (y / (x.abs() + 1.0)).square().mean()


@pytest.fixture(scope="module")
def joint() -> Captured:
    return capture(Net(), (torch.randn(4, 8),), {}, name="net", granularity_bytes=1, context={"device": "cpu"})


def a_schedule_with_replays(joint: Captured) -> Lowered:
    for seed in range(200):
        lowered = lower(joint, random_schedule(joint.program, seed, drop=0.1))
        replays = [n for n in lowered.backward.graph.nodes if n.target is replay]
        if len({n.args[1] for n in replays}) == 2:
            return lowered
    raise AssertionError("no schedule replays both random ops in the backward")


@pytest.mark.parametrize("seed", range(40))
def test_every_lowering_of_a_legal_schedule_is_proven(joint: Captured, seed: int) -> None:
    lowered = lower(joint, random_schedule(joint.program, seed, drop=0.02 * (1 + seed % 10)))
    nodes = len(lowered.forward.graph.nodes) + len(lowered.backward.graph.nodes)
    assert prove(joint, lowered) == nodes


def test_the_unplanned_lowering_is_proven(joint: Captured) -> None:
    assert prove(joint, lower(joint, unplanned_schedule(joint.program))) > len(joint.program.ops)


def calls(lowered: Lowered, target: object) -> list[fx.Node]:
    found = [n for g in (lowered.forward, lowered.backward) for n in g.graph.nodes if n.target is target]
    assert found, f"the case has no {target}"
    return found


def swap_arguments(_: Captured, lowered: Lowered) -> None:
    node = calls(lowered, ATEN.div.Tensor)[0]
    node.args = (node.args[1], node.args[0])


def change_a_constant(_: Captured, lowered: Lowered) -> None:
    node = calls(lowered, ATEN.bernoulli.p)[0]
    node.args = (node.args[0], 0.5, *node.args[2:])


def change_the_type_of_a_constant(_: Captured, lowered: Lowered) -> None:
    node = calls(lowered, ATEN._softmax.default)[0]
    node.args = (node.args[0], node.args[1], 0)  # False == 0, yet it is another overload to some callers


def leave_a_transpose_out(_: Captured, lowered: Lowered) -> None:
    node = calls(lowered, ATEN.addmm.default)[0]
    transposed = node.args[2]
    assert isinstance(transposed, fx.Node)
    assert transposed.target is ATEN.t.default
    node.update_arg(2, transposed.args[0])


def call_something_else(_: Captured, lowered: Lowered) -> None:
    calls(lowered, ATEN.add.Tensor)[0].target = ATEN.sub.Tensor


def add_a_keyword(_: Captured, lowered: Lowered) -> None:
    calls(lowered, ATEN.add.Tensor)[0].kwargs = {"alpha": 2}


def run_again_without_replay(_: Captured, lowered: Lowered) -> None:
    node = calls(lowered, replay)[0]
    _device, _state, target, args, kwargs = node.args
    node.target, node.args, node.kwargs = target, args, kwargs  # type: ignore[assignment]


def replay_under_another_state(_: Captured, lowered: Lowered) -> None:
    nodes = [n for n in calls(lowered, replay) if n.graph is lowered.backward.graph]
    first, other = nodes[0], next(n for n in nodes if n.args[1] is not nodes[0].args[1])
    first.update_arg(1, other.args[1])


def replay_another_op(_: Captured, lowered: Lowered) -> None:
    calls(lowered, replay)[0].update_arg(2, ATEN.bernoulli.default)


def replay_with_another_constant(_: Captured, lowered: Lowered) -> None:
    node = calls(lowered, replay)[0]
    args = node.args[3]
    assert isinstance(args, tuple | list)
    node.update_arg(3, (args[0], 0.7, *args[2:]))


def read_the_state_too_early(joint: Captured, lowered: Lowered) -> None:
    states = [n for n in lowered.forward.graph.nodes if n.target is read_state]
    states[0].append(states[1])  # both before the first random op


def read_the_state_too_late(joint: Captured, lowered: Lowered) -> None:
    state = next(n for n in lowered.forward.graph.nodes if n.target is read_state)
    draw = calls(lowered, ATEN.bernoulli.p)[0]
    assert joint.op_nodes[state.meta[STATE_OF]].target is draw.target
    draw.append(state)


def reorder_what_is_saved(_: Captured, lowered: Lowered) -> None:
    output = next(iter(lowered.forward.graph.find_nodes(op="output")))
    results = list(output.args[0])
    results[-1], results[-2] = results[-2], results[-1]
    output.args = (tuple(results),)


def save_one_less(_: Captured, lowered: Lowered) -> None:
    output = next(iter(lowered.forward.graph.find_nodes(op="output")))
    output.args = (tuple(output.args[0])[:-1],)


def swap_gradients(joint: Captured, lowered: Lowered) -> None:
    output = next(iter(lowered.backward.graph.find_nodes(op="output")))
    results = list(output.args[0])
    one, two = (i for i, r in enumerate(results) if r is not None and tuple(_shape(joint, i)) == (8, 8))
    results[one], results[two] = results[two], results[one]
    output.args = (tuple(results),)


def _shape(joint: Captured, gradient: int) -> torch.Size:
    return joint.outputs[joint.forward_output_count + gradient].meta["val"].shape


def drop_a_gradient(_: Captured, lowered: Lowered) -> None:
    output = next(iter(lowered.backward.graph.find_nodes(op="output")))
    results = list(output.args[0])
    results[next(i for i, r in enumerate(results) if r is not None)] = None
    output.args = (tuple(results),)


def forget_a_mutation(joint: Captured, lowered: Lowered) -> None:
    output = next(iter(lowered.forward.graph.find_nodes(op="output")))
    seen = next(n for n in lowered.forward.graph.nodes if n.meta.get("ebbtide_claim") in joint.mutated)
    output.args = ((seen, *tuple(output.args[0])[1:]),)


def save_a_mutated_input(joint: Captured, lowered: Lowered) -> None:
    forward = next(iter(lowered.forward.graph.find_nodes(op="output")))
    seen = next(n for n in lowered.forward.graph.nodes if n.meta.get("ebbtide_claim") in joint.mutated)
    results = list(forward.args[0])
    saved = [n for n in lowered.backward.graph.nodes if n.op == "placeholder"][: lowered.saved_count]
    results[-1] = seen
    forward.args = (tuple(results),)
    saved[-1].meta["ebbtide_claim"] = seen.meta["ebbtide_claim"]
    saved[-1].meta.pop(STATE_OF, None)


def rename_a_placeholder(_: Captured, lowered: Lowered) -> None:
    next(iter(lowered.backward.graph.find_nodes(op="placeholder"))).target = "something"


def swap_placeholders(_: Captured, lowered: Lowered) -> None:
    one, two = list(lowered.forward.graph.find_nodes(op="placeholder"))[:2]
    one.append(two)
    two.append(one)


def claim_nothing(_: Captured, lowered: Lowered) -> None:
    del calls(lowered, ATEN.add.Tensor)[0].meta["ebbtide_claim"]


def claim_another_element(_: Captured, lowered: Lowered) -> None:
    calls(lowered, operator.getitem)[0].update_arg(1, 1)


def fetch_an_attribute(_: Captured, lowered: Lowered) -> None:
    graph = lowered.forward.graph
    with graph.inserting_before(calls(lowered, ATEN.add.Tensor)[0]):
        graph.create_node("get_attr", "weight")


def transpose_otherwise(_: Captured, lowered: Lowered) -> None:
    node = calls(lowered, ATEN.t.default)[0]
    node.target, node.args = ATEN.as_strided.default, (node.args[0], [8, 8], [8, 1], 0)


TAMPERINGS: list[Callable[[Captured, Lowered], None]] = [
    swap_arguments,
    change_a_constant,
    change_the_type_of_a_constant,
    leave_a_transpose_out,
    call_something_else,
    add_a_keyword,
    run_again_without_replay,
    replay_under_another_state,
    replay_another_op,
    replay_with_another_constant,
    read_the_state_too_early,
    read_the_state_too_late,
    reorder_what_is_saved,
    save_one_less,
    swap_gradients,
    drop_a_gradient,
    forget_a_mutation,
    save_a_mutated_input,
    rename_a_placeholder,
    swap_placeholders,
    claim_nothing,
    claim_another_element,
    fetch_an_attribute,
    transpose_otherwise,
]


@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda f: f.__name__.replace("_", " "))
def test_tampering_is_rejected(joint: Captured, tamper: Callable[[Captured, Lowered], None]) -> None:
    lowered = a_schedule_with_replays(joint)
    prove(joint, lowered)
    tamper(joint, lowered)
    with pytest.raises(ProofError):
        prove(joint, lowered)


def test_first_runs_of_random_ops_keep_their_order(joint: Captured) -> None:
    lowered = lower(joint, unplanned_schedule(joint.program))
    one, two = calls(lowered, ATEN.bernoulli.p)
    one.meta["ebbtide_claim"], two.meta["ebbtide_claim"] = two.meta["ebbtide_claim"], one.meta["ebbtide_claim"]
    with pytest.raises(ProofError):
        prove(joint, lowered)

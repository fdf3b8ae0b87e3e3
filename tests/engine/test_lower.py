"""The two lowered graphs keep AOTAutograd's contracts, and hold what the schedule says and no more."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.capture.offline import capture
from ebbtide.lower.emit import MAKES
from ebbtide.lower.lowering import Lowered, lower
from ebbtide.lower.targets import read_state, replay
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide.zoo import GPTConfig, gpt
from random_schedule import random_schedule


@pytest.fixture(scope="module")
def joint() -> Captured:
    case = gpt(2, GPTConfig(vocabulary=16, length=8, layers=1, width=16, heads=2, dropout=0.1))
    return capture(case.model, case.args, {}, name="gpt", granularity_bytes=1, context={"device": "cpu"})


SEEDS = pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])


def lowered_by(joint: Captured, seed: int | None) -> Lowered:
    program = joint.program
    return lower(joint, unplanned_schedule(program) if seed is None else random_schedule(program, seed, drop=0.05))


def placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="placeholder"))


def results(graph: fx.GraphModule) -> list[object]:
    (output,) = graph.graph.find_nodes(op="output")
    return list(output.args[0])


@SEEDS
def test_placeholders_are_named_as_their_targets_and_come_in_order(joint: Captured, seed: int | None) -> None:
    lowered = lowered_by(joint, seed)
    assert len(placeholders(lowered.forward)) == len(joint.primals)
    assert len(placeholders(lowered.backward)) == lowered.saved_count + len(joint.tangents)
    for graph in (lowered.forward, lowered.backward):
        names = [n.name for n in placeholders(graph)]
        assert names == [n.target for n in placeholders(graph)]
        assert len(set(names)) == len(names)
        nodes = list(graph.graph.nodes)
        assert nodes[: len(names)] == placeholders(graph), "inputs come first"


@SEEDS
def test_outputs_come_in_the_joint_order(joint: Captured, seed: int | None) -> None:
    lowered = lowered_by(joint, seed)
    assert len(results(lowered.forward)) == joint.forward_output_count + lowered.saved_count
    gradients = joint.outputs[joint.forward_output_count :]
    assert [g is None for g in results(lowered.backward)] == [g is None for g in gradients]


@SEEDS
def test_every_run_is_one_node(joint: Captured, seed: int | None) -> None:
    program = joint.program
    schedule = unplanned_schedule(program) if seed is None else random_schedule(program, seed, drop=0.05)
    lowered = lower(joint, schedule)
    targets = {node.target for node in joint.op_nodes}
    runs = 0
    for graph in (lowered.forward, lowered.backward):
        runs += sum(1 for n in graph.graph.nodes if n.target in targets or n.target is replay)
    assert runs == sum(1 for op in schedule.computes if op is not None)


@SEEDS
def test_nothing_mutated_is_saved_and_nothing_is_saved_twice(joint: Captured, seed: int | None) -> None:
    lowered = lowered_by(joint, seed)
    saved = results(lowered.forward)[joint.forward_output_count :]
    assert len(set(saved)) == len(saved)
    assert all(isinstance(node, fx.Node) for node in saved)


@SEEDS
def test_no_unread_element_is_kept(joint: Captured, seed: int | None) -> None:
    lowered = lowered_by(joint, seed)
    for graph in (lowered.forward, lowered.backward):
        assert all(n.users for n in graph.graph.nodes if n.target is operator.getitem)


def test_the_unplanned_step_reads_no_generator_state(joint: Captured) -> None:
    lowered = lowered_by(joint, None)
    targets = {n.target for g in (lowered.forward, lowered.backward) for n in g.graph.nodes}
    assert not targets & {read_state, replay}


def test_states_are_read_only_for_what_is_replayed(joint: Captured) -> None:
    schedule = random_schedule(joint.program, 2, drop=0.05)
    repeated = {
        op
        for op in schedule.computes
        if op is not None and joint.program.ops[op].random and schedule.computes.count(op) > 1
    }
    forward = lower(joint, schedule).forward.graph.nodes
    assert sum(1 for n in forward if n.target is read_state) == len(repeated)


def test_chains_of_views_are_folded(joint: Captured) -> None:
    views = {torch.ops.aten.view.default, torch.ops.aten.permute.default, torch.ops.aten.transpose.int}
    captured = sum(1 for n in joint.graph.nodes if n.target in views)
    lowered = lowered_by(joint, None)
    kept = sum(1 for g in (lowered.forward, lowered.backward) for n in g.graph.nodes if n.target in views)
    assert kept < captured


def test_a_weight_that_is_transposed_twice_is_the_weight(joint: Captured) -> None:
    transpose = torch.ops.aten.t.default
    assert any(n.target is transpose and n.args[0].target is transpose for n in joint.graph.nodes)
    for graph in (lowered_by(joint, None).forward, lowered_by(joint, None).backward):
        assert not any(n.target is transpose and n.args[0].target is transpose for n in graph.graph.nodes)


def test_every_buffer_that_is_made_is_marked(joint: Captured) -> None:
    lowered = lowered_by(joint, None)
    made = [n.meta[MAKES] for g in (lowered.forward, lowered.backward) for n in g.graph.nodes if MAKES in n.meta]
    assert len(set(made)) == len(made)
    read = {b for op in joint.program.ops for b in op.inputs} - set(joint.program.tangents)
    assert read <= set(made)

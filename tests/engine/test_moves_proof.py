"""The static proof of graphs that move buffers: every lowering passes, every tampering with a move is rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_proof import Net, calls
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.capture.offline import capture
from ebbtide.lower.lowering import Lowered, lower
from ebbtide.lower.proof import ProofError, prove
from ebbtide.lower.targets import arrive, offload, reload, settle
from random_schedule import random_schedule


@pytest.fixture(scope="module")
def joint() -> Captured:
    return capture(Net(), (torch.randn(4, 8),), {}, name="net", granularity_bytes=1, context={"device": "cpu"})


def lowered_moves(joint: Captured, seed: int) -> Lowered:
    return lower(joint, random_schedule(joint.program, seed, drop=0.03 * (1 + seed % 10), tiers=("disk", "host")))


@pytest.mark.parametrize("seed", range(40))
def test_every_lowering_of_a_schedule_that_moves_is_proven(joint: Captured, seed: int) -> None:
    lowered = lowered_moves(joint, seed)
    assert prove(joint, lowered) == len(lowered.forward.graph.nodes) + len(lowered.backward.graph.nodes)


def a_lowering(joint: Captured) -> Lowered:
    """One with two slots of one tier and one shape that come back, and a buffer that comes back twice."""
    for seed in range(400):
        lowered = lowered_moves(joint, seed)
        back = [n for n in both(lowered) if n.target is reload]
        slots = [n.args[0] for n in back]
        if len(slots) > len(set(slots)) and len({shape_of(lowered, n) for n in back}) < len(set(slots)):
            if any(n.target is settle for n in both(lowered)):
                return lowered
    raise AssertionError("no schedule moves enough")


def both(lowered: Lowered) -> list[fx.Node]:
    return [n for g in (lowered.forward, lowered.backward) for n in g.graph.nodes]


def shape_of(lowered: Lowered, node: fx.Node) -> tuple[int, ...]:
    """Of the slot that a node names."""
    index = node.args[0]
    assert isinstance(index, int)
    return lowered.slots[index].shape


def two_alike(lowered: Lowered) -> tuple[fx.Node, fx.Node]:
    """Two ways back of slots that have one shape."""
    back = calls(lowered, reload)
    for one in back:
        for two in back:
            if one.args != two.args and shape_of(lowered, one) == shape_of(lowered, two):
                return one, two
    raise AssertionError


def fetch_another_slot(_: Captured, lowered: Lowered) -> None:
    one, two = two_alike(lowered)
    one.update_arg(0, two.args[0])


def fetch_and_arrive_another_slot(_: Captured, lowered: Lowered) -> None:
    one, two = two_alike(lowered)
    (arrival,) = one.users
    one.update_arg(0, two.args[0])
    arrival.update_arg(0, two.args[0])


def arrive_from_another(_: Captured, lowered: Lowered) -> None:
    one, two = two_alike(lowered)
    next(iter(one.users)).update_arg(0, two.args[0])


def read_before_it_arrives(_: Captured, lowered: Lowered) -> None:
    arrival = calls(lowered, arrive)[0]
    coming = arrival.args[1]
    assert isinstance(coming, fx.Node)
    arrival.replace_all_uses_with(coming)


def send_another_tensor(_: Captured, lowered: Lowered) -> None:
    one, two = calls(lowered, offload)[:2]
    one.update_arg(1, two.args[1])


def send_a_slot_twice(_: Captured, lowered: Lowered) -> None:
    node = calls(lowered, offload)[0]
    with node.graph.inserting_after(node):
        node.graph.call_function(offload, node.args)


def send_to_no_slot(_: Captured, lowered: Lowered) -> None:
    calls(lowered, offload)[0].update_arg(0, len(lowered.slots))


def fetch_what_never_left(_: Captured, lowered: Lowered) -> None:
    index = calls(lowered, reload)[0].args[0]
    node = next(n for n in calls(lowered, offload) if n.args[0] == index)
    waits = [n for n in both(lowered) if n.target is settle and n.args[0] == index]
    for each in (*waits, node):
        each.graph.erase_node(each)


def wait_for_another(_: Captured, lowered: Lowered) -> None:
    node = calls(lowered, settle)[0]
    other = next(n for n in calls(lowered, offload) if n.args[0] != node.args[0])
    node.update_arg(0, other.args[0])


def wait_for_what_nobody_sent(_: Captured, lowered: Lowered) -> None:
    node = calls(lowered, settle)[0]
    sent = next(n for n in calls(lowered, offload) if n.args[0] == node.args[0])
    sent.graph.erase_node(sent)


def claim_another_buffer(_: Captured, lowered: Lowered) -> None:
    one, two = two_alike(lowered)
    a, b = next(iter(one.users)), next(iter(two.users))
    a.meta["ebbtide_claim"], b.meta["ebbtide_claim"] = b.meta["ebbtide_claim"], a.meta["ebbtide_claim"]


TAMPERINGS: list[Callable[[Captured, Lowered], None]] = [
    fetch_another_slot,
    fetch_and_arrive_another_slot,
    arrive_from_another,
    read_before_it_arrives,
    send_another_tensor,
    send_a_slot_twice,
    send_to_no_slot,
    fetch_what_never_left,
    wait_for_another,
    wait_for_what_nobody_sent,
    claim_another_buffer,
]


@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda f: f.__name__.replace("_", " "))
def test_tampering_with_a_move_is_rejected(joint: Captured, tamper: Callable[[Captured, Lowered], None]) -> None:
    lowered = a_lowering(joint)
    prove(joint, lowered)
    tamper(joint, lowered)
    with pytest.raises(ProofError):
        prove(joint, lowered)


@pytest.mark.parametrize(
    "changed",
    [{"shape": (1,)}, {"stride": (1, 8)}, {"dtype": torch.int32}, {"bytes": 4}, {"device": torch.device("meta")}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_slot_that_is_not_what_its_buffer_is_is_rejected(joint: Captured, changed: dict[str, object]) -> None:
    lowered = a_lowering(joint)
    index = calls(lowered, offload)[0].args[0]
    assert isinstance(index, int)
    slots = list(lowered.slots)
    slots[index] = replace(slots[index], **changed)
    with pytest.raises(ProofError, match=f"slot {index} is for"):
        prove(joint, replace(lowered, slots=tuple(slots)))


def test_slots_that_overlap_are_rejected(joint: Captured) -> None:
    lowered = a_lowering(joint)
    moved = [replace(slot, offset=0) for slot in lowered.slots]
    with pytest.raises(ProofError, match="overlaps"):
        prove(joint, replace(lowered, slots=tuple(moved)))
    with pytest.raises(ProofError, match="two slots"):
        prove(joint, replace(lowered, slots=(*lowered.slots, lowered.slots[0])))

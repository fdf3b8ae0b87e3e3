"""The order in which gradients reach parameters: eager's, though a planned backward hands them all out at once.

Hooks on parameters fire when autograd accumulates. Eager does that as its backward comes by; where all gradients
leave one node, autograd's order is that of a heap whose entries are equal. Hooks that draw random numbers or share
state would give other bits. So before a step's node runs, the nodes behind it are told their places: of its captured
backward, in the order in which that makes them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.torch_seams.aot import sequence_number
from ebbtide.torch_seams.autograd import accumulate_in_order

__all__ = ["gradient_order", "keep_order"]

_FIRST = 2**63  # above every sequence number


def gradient_order(captured: Captured) -> tuple[int, ...]:
    """Per tensor among the primals its place; those without a gradient have one too, which means nothing.

    1. Autograd runs its nodes by descending sequence number, and a node of the joint graph knows the number of the one
       that was made with it, or that runs with it; sums of gradients, made between two, are given the highest. So in
       the backward a node is made at the least number so far.
    2. A gradient arrives with the reader of its parameter that has the highest number not above the one at which it
       was made: a backward that hands on what it gets (an addition's) leaves no node.
    3. What arrives with one reader comes in the order of its arguments.
    """
    places: dict[fx.Node, int] = {}
    numbers: dict[fx.Node, int] = {}
    after, lowest = _forward_end(captured), _FIRST
    for place, node in enumerate(captured.graph.nodes):
        places[node] = place
        number = sequence_number(node)
        if place >= after and number >= 0:
            number = lowest = min(lowest, number)
        numbers[node] = number
    gradients = captured.outputs[captured.forward_output_count :]
    keys: list[tuple[int, int, int]] = []
    for primal, gradient in zip(captured.primals, gradients, strict=True):
        if not isinstance(primal.meta.get("val"), torch.Tensor):
            continue
        if not isinstance(gradient, fx.Node):
            keys.append((0, 0, 0))
            continue
        made = numbers[gradient] if numbers[gradient] >= 0 else _FIRST  # a tangent has none
        readers = [each for each in primal.users if places[each] < after and numbers[each] <= made]
        reader = max(readers, key=lambda each: (numbers[each], -places[each]), default=gradient)
        argument = reader.all_input_nodes.index(primal) if reader is not gradient else 0
        keys.append((-made if reader is gradient else -numbers[reader], argument, places[gradient]))
    by_place = sorted(range(len(keys)), key=keys.__getitem__)
    order = [0] * len(keys)
    for place, index in enumerate(by_place):
        order[index] = place
    return tuple(order)


def _forward_end(captured: Captured) -> int:
    """Place of the first node that needs a tangent: what comes before it in the backward needs none, nor does a sum."""
    needs = set(captured.tangents)
    for place, node in enumerate(captured.graph.nodes):
        if node.op == "call_function" and not needs.isdisjoint(node.all_input_nodes):
            return place
    return len(captured.graph.nodes)


def keep_order(node: weakref.ref[Any], order: tuple[int, ...], _: Any) -> None:
    """A prehook of a step's node."""
    own = node()
    if own is not None:
        accumulate_in_order(own, order)

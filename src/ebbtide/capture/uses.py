"""One input per use of a tensor, so that autograd adds up its gradients one by one, as in eager.

A graph gives one gradient for each input. Of a tensor that it reads several times that is a sum, to which autograd adds
what other graphs, or code between them, give the same tensor: (later + (third + second + first)), where eager has
(((later + third) + second) + first). So each use gets an input of its own, all of which take the same tensor.

1. A use is a place among the arguments of a node whose result takes a gradient. Autograd runs the nodes in reverse and
   adds what one of them gives to the same tensor in the order of its arguments. What a graph gives it adds in the order
   of the graph's inputs, which is made that of the last node's arguments, then of the one's before it.
2. Tensors that are changed in place keep one input, as do leaves under autocast, which are cast once for all uses.
3. What an operator does with one argument inside of it stays one use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ebbtide.torch_seams.conditions import autocast_now, changes
from ebbtide.torch_seams.dynamo import copied_graph, input_again

__all__ = ["one_input_per_use", "uses_by"]


def one_input_per_use(graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[int]]:
    """``graph`` with an input for each use, and which input each that is added takes the tensor of.

    Args:
        graph: of Dynamo, which is left as it is.
        inputs: examples of its inputs.
    """
    shared = [position for position, uses in enumerate(_uses(graph.graph, inputs)) if len(uses) > 1]
    if not shared:
        return graph, []
    made = copied_graph(graph)
    placeholders = made.graph.find_nodes(op="placeholder")
    all_uses = _uses(made.graph, inputs)
    added: list[int] = []
    last = placeholders[-1]
    for position in shared:
        node, uses = placeholders[position], all_uses[position]
        own = [node]
        for number in range(1, len(uses)):
            last = input_again(node, last, f"{node.name}_use{number}")
            own.append(last)
            added.append(position)
        for user in dict.fromkeys(uses):
            given = iter([each for each, other in zip(own, uses, strict=True) if other is user])
            _replace(user, node, given)
    made.recompile()
    return made, added


def _uses(graph: fx.Graph, inputs: Sequence[Any]) -> list[list[fx.Node]]:
    """Per input whose uses are told apart, its users in the order of definition 1, each as often as it uses it."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    casts = any(autocast_now().values()) or any("autocast" in str(each.target) for each in graph.nodes)
    found: list[list[fx.Node]] = []
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        plain = isinstance(value, torch.Tensor) and value.requires_grad and not (casts and value.is_leaf)
        users = [] if not plain or _may_change(node) else filter(_takes_gradient, node.users)
        in_reverse = sorted(users, key=place.__getitem__, reverse=True)
        found.append([user for user in in_reverse for _ in range(uses_by(user, node))])
    return found


def _takes_gradient(node: fx.Node) -> bool:
    if node.op == "output":
        return False
    values = node.meta.get("example_value")
    values = values if isinstance(values, tuple | list) else (values,)
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in values)


def _may_change(node: fx.Node) -> bool:
    """Whether a user may change ``node`` in place; norms that keep statistics change those."""
    return any(changes(each) and not ("norm" in str(each.target) and node in each.args[:1]) for each in node.users)


def uses_by(user: fx.Node, node: fx.Node) -> int:
    """At how many places among its arguments ``user`` reads ``node``."""
    count = 0

    def see(each: fx.Node) -> fx.Node:
        nonlocal count
        count += each is node
        return each

    fx.map_arg((user.args, user.kwargs), see)
    return count


def _replace(user: fx.Node, node: fx.Node, given: Iterator[fx.Node]) -> None:
    user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda each: next(given) if each is node else each)

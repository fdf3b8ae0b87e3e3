"""The proof that a step with updates in it is the captured one otherwise: nothing runs.

1. Every node but an update has its like in the captured graph, by name: the same call of the likes of its arguments.
2. An update reads the gradient that the captured step returns for its parameter, and the settlement where there is
   one; nobody reads the update.
3. Each output is the captured one's, or nothing where an update has taken its place; no parameter has two.
4. After an update nothing reads the memory of its parameter.
5. A step that looks at its gradients (``looks``) is the captured one but for looks, one at each that is to be applied,
   a settlement that reads all of them, and copies of gradients that others read.
6. A step with a second pass is the one without but for calls that are named after another one, each the same call of
   the same values, whichever pass has made them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ebbflow.capture.joint import Captured
from ebbflow.errors import InternalError
from ebbflow.inside.looks import Look, Settlement, settlement_of
from ebbflow.inside.second_pass import PREFIX as AGAIN
from ebbflow.inside.updates import Update
from ebbflow.torch_seams.storages import storage_key
from ebbflow.torch_seams.trees import tree_leaves

__all__ = ["UpdateError", "prove_looks", "prove_second_pass", "prove_updates"]


class UpdateError(InternalError):
    """A step with updates is not the captured one. Nothing of it has run."""


def prove_updates(captured: Captured, inside: Captured) -> int:
    """How many updates there are in ``inside``, which is ``captured`` but for them.

    Raises:
        UpdateError: if it is not.
    """
    likes = {node.name: node for node in captured.graph.nodes}
    claims: dict[fx.Node, fx.Node] = {}
    wanted = list(captured.outputs[captured.forward_output_count :])
    settlement = settlement_of(captured)
    settlements = [] if settlement is None else [settlement]
    taken: dict[int, int] = {}  # by position, the storage that is changed
    ops = set(inside.op_nodes)
    for node in inside.graph.nodes:
        if node.op == "output":
            break
        for source in node.all_input_nodes if node in ops else ():
            value = source.meta.get("val")
            resident = inside.buffer_of.get(source, 0) is None and isinstance(value, torch.Tensor)
            _require(not (resident and storage_key(value) in taken.values()), f"{node.name} reads what was updated")
        if isinstance(node.target, Update):
            update = node.target
            _require(update.position not in taken, f"{update.parameter} is updated twice")
            _require(claims.get(node.args[0]) is wanted[update.position], f"{update.parameter} has another gradient")
            waits = [claims.get(each, each) for each in node.args[1:-2] if isinstance(each, fx.Node)]
            _require(waits == settlements, f"the update of {update.parameter} does not wait for all gradients")
            _require(not node.users, f"somebody reads the update of {update.parameter}")
            taken[update.position] = storage_key(inside.primals[update.position].meta["val"])
            continue
        like = likes.get(node.name)
        _require(like is not None and (like.op, like.target) == (node.op, node.target), f"{node.name} is new")
        assert like is not None
        given = [claims.get(each, each) if isinstance(each, fx.Node) else each for each in _leaves(node)]
        _require(_same(given, _leaves(like)), f"{node.name} has other arguments")
        claims[node] = like
    expected = [None if position in taken else each for position, each in enumerate(wanted)]
    everything = [*captured.outputs[: captured.forward_output_count], *expected]
    given = [claims.get(each, each) if isinstance(each, fx.Node) else each for each in inside.outputs]
    _require(_same(given, everything), "other outputs")
    return len(taken)


def prove_looks(captured: Captured, looked: Captured, positions: Iterable[int]) -> None:
    """Definition 5, of ``looked``, whose gradients at ``positions`` are to be applied.

    Raises:
        UpdateError: if it does not hold.
    """
    likes = {node.name: node for node in captured.graph.nodes}
    claims: dict[fx.Node, fx.Node] = {}
    wanted = list(captured.outputs[captured.forward_output_count :])
    given = list(looked.outputs[looked.forward_output_count :])
    looks: dict[int, fx.Node] = {}
    settled: list[fx.Node] = []
    for node in looked.graph.nodes:
        if node.op == "output":
            break
        if isinstance(node.target, Look):
            position = node.target.position
            _require(position not in looks, f"{node.target.parameter} is looked at twice")
            _require(node.args[0] is given[position], f"{node.name} looks at something else")
            looks[position] = node
        elif isinstance(node.target, Settlement):
            read = dict(zip(node.target.positions, node.all_input_nodes, strict=True))
            _require(not settled and read == looks and set(read) == set(positions), "not all gradients are settled")
            settled.append(node)
        elif (like := likes.get(node.name)) is None:
            copied = node.target is torch.ops.aten.clone.default and claims.get(node.args[0]) in wanted
            _require(copied and len(node.args) == 1 and not node.kwargs, f"{node.name} is new")
            claims[node] = claims[node.args[0]]
        else:
            _require((like.op, like.target) == (node.op, node.target), f"{node.name} is another call")
            mine = [claims.get(each, each) if isinstance(each, fx.Node) else each for each in _leaves(node)]
            _require(_same(mine, _leaves(like)), f"{node.name} has other arguments")
            claims[node] = like
    _require(bool(settled) and settled[0].all_input_nodes == [*looks.values()], "not all looks are settled")
    mine = [claims.get(each, each) if isinstance(each, fx.Node) else each for each in looked.outputs]
    _require(_same(mine, list(captured.outputs)), "other outputs")


def prove_second_pass(captured: Captured, after: Captured) -> int:
    """How many ops are made again in ``after``, which is ``captured`` but for them (definition 6).

    Raises:
        UpdateError: if it is not.
    """
    likes = {node.name: node for node in captured.graph.nodes}
    claims: dict[fx.Node, fx.Node] = {}
    again = 0
    for node in after.graph.nodes:
        if node.op == "output":
            break
        like = likes.get(node.name) or likes.get(node.name.removeprefix(AGAIN))
        _require(like is not None and (like.op, like.target) == (node.op, node.target), f"{node.name} is new")
        assert like is not None
        mine = [claims.get(each, each) if isinstance(each, fx.Node) else each for each in _leaves(node)]
        _require(_same(mine, _leaves(like)), f"{node.name} has other arguments")
        claims[node] = like
        again += like.name != node.name and node in after.op_nodes
    mine = [claims.get(each, each) if isinstance(each, fx.Node) else each for each in after.outputs]
    _require(_same(mine, list(captured.outputs)), "other outputs")
    return again


def _leaves(node: fx.Node) -> list[Any]:
    return list(tree_leaves((node.args, node.kwargs)))


def _same(given: list[Any], wanted: list[Any]) -> bool:
    return len(given) == len(wanted) and all(
        mine is theirs if isinstance(mine, fx.Node) or isinstance(theirs, fx.Node) else _equal(mine, theirs)
        for mine, theirs in zip(given, wanted, strict=True)
    )


def _equal(mine: Any, theirs: Any) -> bool:
    return type(mine) is type(theirs) and (mine is theirs or mine == theirs or repr(mine) == repr(theirs))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise UpdateError(f"a step with updates is not what was captured: {what}")

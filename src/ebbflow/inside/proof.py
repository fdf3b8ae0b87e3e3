"""The proof that a step with updates in it is the captured one otherwise: nothing runs.

1. Every node but an update has its like in the captured graph, by name: the same call of the likes of its arguments.
2. An update reads the gradient that the captured step returns for its parameter, and nobody reads the update.
3. Each output is the captured one's, or nothing where an update has taken its place; no parameter has two.
4. After an update nothing reads the memory of its parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ebbflow.capture.joint import Captured
from ebbflow.errors import InternalError
from ebbflow.inside.updates import Update
from ebbflow.torch_seams.storages import storage_key
from ebbflow.torch_seams.trees import tree_leaves

__all__ = ["UpdateError", "prove_updates"]


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

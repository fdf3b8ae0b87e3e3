"""The proof that a step with updates in it is the captured one otherwise: nothing runs.

1. Every node but an update has its like in the captured graph, by name: the same call of the likes of its arguments;
   or it is a copy of a gradient.
2. An update reads the gradient that the captured step returns for its parameter, in memory that nobody else reads but
   to take its norm, and the total norm where there is one; nobody reads the update.
3. Each output is the captured one's, or nothing where an update has taken its place; no parameter has two.
4. After an update nothing reads the memory of its parameter.
5. A step that takes norms (``norm_ops``) is the captured one but for partial norms, one of each gradient that is to be
   applied, a total norm that reads all of them, and copies of gradients that others read.
6. A step with a recompute pass is the one without but for calls that are named after another one, each the same call of
   the same values, whichever pass has made them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ebbtide.capture.claims import Claims, Results
from ebbtide.capture.joint import Captured
from ebbtide.optimizer.in_step.gradient_recompute import PREFIX as AGAIN
from ebbtide.optimizer.in_step.norm_ops import PartialNorm, TotalNorm, total_norm_of
from ebbtide.optimizer.in_step.updates import Update
from ebbtide.torch_seams.storages import storage_key
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["prove_norms", "prove_recompute_pass", "prove_updates"]

_WHAT = "a step with updates"
_NOTHING = Results()
"""What an op claims that nobody reads."""


def prove_updates(captured: Captured, updating: Captured) -> int:
    """How many updates there are in ``updating``, which is ``captured`` but for them.

    Raises:
        RewriteError: if it is not.
    """
    proof = _Updates(captured, updating)
    proof.walk(updating)
    return len(proof.taken)


def prove_norms(captured: Captured, normed: Captured, positions: Iterable[int]) -> None:
    """Hold ``normed`` against definition 5; its gradients at ``positions`` are to be applied.

    Raises:
        RewriteError: if it does not hold.
    """
    _Norms(captured, normed, positions).walk(normed)


def prove_recompute_pass(captured: Captured, after: Captured) -> int:
    """How many ops are made again in ``after``, which is ``captured`` but for them (definition 6).

    Raises:
        RewriteError: if it is not.
    """
    proof = _RecomputePass(captured, _WHAT)
    proof.walk(after)
    return sum(proof.claims[node].name != node.name for node in after.op_nodes)


class _WithCopies(Claims):
    """Gradients of ``captured`` may be copied."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured, _WHAT)
        self.wanted = list(captured.outputs[captured.forward_output_count :])

    def other(self, node: fx.Node, like: fx.Node | None) -> Any:
        """A copy of a gradient claims it."""
        copied = like is None and node.target is torch.ops.aten.clone.default and len(node.args) == 1
        if copied and not node.kwargs and any(self.claim(node.args[0]) is each for each in self.wanted):
            return self.claim(node.args[0])
        return super().other(node, like)


class _Updates(_WithCopies):
    """A step with updates against the one without (definitions 1 to 4)."""

    def __init__(self, captured: Captured, updating: Captured) -> None:
        super().__init__(captured)
        self.updating, self.ops = updating, set(updating.op_nodes)
        total = total_norm_of(captured)
        self.totals = [] if total is None else [total]
        self.taken: dict[int, int] = {}  # by position, the storage that is changed

    def own(self, node: fx.Node) -> Any:
        """What an update claims (definition 2); no node reads what was updated (definition 4)."""
        for source in node.all_input_nodes if node in self.ops else ():
            value = source.meta.get("val")
            resident = self.updating.buffer_of.get(source, 0) is None
            if resident and isinstance(value, torch.Tensor):
                self.require(storage_key(value) not in self.taken.values(), f"{node.name} reads what was updated")
        if not isinstance(node.target, Update):
            return None
        update = node.target
        self.require(update.position not in self.taken, f"{update.parameter} is updated twice")
        gradient = self.claim(node.args[0]) is self.wanted[update.position]
        self.require(gradient, f"{update.parameter} has another gradient")
        applied = node.args[0]
        buffer = self.updating.buffer_of.get(applied) if isinstance(applied, fx.Node) else None
        readers = () if buffer is None else self.updating.program.readers[buffer]
        others = [each for each in (self.updating.op_nodes[index] for index in readers) if each is not node]
        alone = buffer is not None and all(isinstance(each.target, PartialNorm) for each in others)
        self.require(alone, f"others read the gradient of {update.parameter}")
        waits = [self.claim(each) for each in node.args[1:-2] if isinstance(each, fx.Node)]
        self.require(waits == self.totals, f"the update of {update.parameter} does not wait for all gradients")
        self.require(not node.users, f"somebody reads the update of {update.parameter}")
        self.taken[update.position] = storage_key(self.updating.primals[update.position].meta["val"])
        return _NOTHING

    def output(self, node: fx.Node) -> None:
        """Outputs are as before, but for gradients that updates have taken (definition 3)."""
        left = [None if position in self.taken else each for position, each in enumerate(self.wanted)]
        self.outputs_are(tree_leaves(node.args), [*self.step.outputs[: self.step.forward_output_count], *left])


class _Norms(_WithCopies):
    """A step that takes norms against the one that takes none (definition 5)."""

    def __init__(self, captured: Captured, normed: Captured, positions: Iterable[int]) -> None:
        super().__init__(captured)
        self.positions = set(positions)
        self.norm_gradients = list(normed.outputs[normed.forward_output_count :])
        self.partials: dict[int, fx.Node] = {}
        self.totals: list[fx.Node] = []

    def own(self, node: fx.Node) -> Any:
        """The norm of a gradient, or of all."""
        if isinstance(node.target, PartialNorm):
            position = node.target.position
            self.require(position not in self.partials, f"{node.target.parameter} has two norms")
            self.require(node.args[0] is self.norm_gradients[position], f"{node.name} is of something else")
            self.partials[position] = node
            return _NOTHING
        if isinstance(node.target, TotalNorm):
            read = dict(zip(node.target.positions, node.all_input_nodes, strict=True))
            alike = not self.totals and read == self.partials and set(read) == self.positions
            self.require(alike, "the total norm is not of all gradients")
            self.totals.append(node)
            return _NOTHING
        return None

    def output(self, node: fx.Node) -> None:
        """All as before, and all norms in the total."""
        complete = bool(self.totals) and self.totals[0].all_input_nodes == [*self.partials.values()]
        self.require(complete, "the total norm is not of all gradients")
        super().output(node)


class _RecomputePass(Claims):
    """A step with a recompute pass against the one without (definition 6)."""

    def like_of(self, node: fx.Node) -> fx.Node | None:
        """The call that it is named after."""
        return self.by_name.get(node.name) or self.by_name.get(node.name.removeprefix(AGAIN))

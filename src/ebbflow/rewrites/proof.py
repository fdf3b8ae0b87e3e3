"""The proof that a rewritten graph is the captured one but for what the rewrites say: nothing runs.

1. Every value of the rewritten graph *claims* a value of the captured one, is a *part* that only ops of a rewrite read,
   or is *free*: made for a guess, of which nothing but time depends.
2. A call that both graphs have claims its like: the same target, the same constants, and arguments that claim the
   arguments of that one.
3. An op of a rewrite reads the head's own operands, in their places and with its constants; its results claim the
   loss, the total weight, the sums of smoothed labels and the three gradients, or are parts. It reads parts of the
   same head alone.
4. What is written over is read by nobody else.
5. Each output claims the captured one's.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ebbflow.capture.joint import Captured
from ebbflow.errors import InternalError
from ebbflow.rewrites.head_kernels import NAMESPACE
from ebbflow.rewrites.head_samples import head_sample
from ebbflow.rewrites.heads import Head, find_heads
from ebbflow.rewrites.replaced import Replaced, replaced_by
from ebbflow.torch_seams.dispatcher import OpOverload, schema_of
from ebbflow.torch_seams.graphs import arguments_of
from ebbflow.torch_seams.trees import tree_leaves

__all__ = ["RewriteError", "prove_rewritten"]

_FREE = "free"
_TAKES = {
    "forward_by_rows": (),
    "forward_with_guess": (),
    "forward_that_keeps": (),
    "backward_over_kept": ("kept",),
    "backward_by_rows": (),
    "backward_in_sums": (),
    "settle_guess": ("hidden",),
    "backward_by_columns": ("statistics",),
    "backward_by_other_columns": ("known", "statistics"),
}
"""Per op, the arguments that are parts."""
_GIVES: dict[str, tuple[str, ...]] = {
    "forward_by_rows": ("loss", "total_weight", "statistics"),
    "forward_with_guess": ("loss", "total_weight", "statistics", "hidden", "known"),
    "forward_that_keeps": ("loss", "total_weight", "kept", "row_sums"),
    "backward_over_kept": ("hidden_gradient", "weight_gradient", "bias_gradient"),
    "backward_by_rows": ("hidden_gradient",),
    "backward_in_sums": ("hidden_gradient", "weight_gradient", "bias_gradient"),
    "settle_guess": ("hidden_gradient",),
    "backward_by_columns": ("weight_gradient", "bias_gradient"),
    "backward_by_other_columns": ("weight_gradient", "bias_gradient"),
}
_OTHERWISE = {"backward_in_sums": ("weight_gradient", "bias_gradient")}
"""Of these results, those whose bits are not the captured ones."""
_PARTS = frozenset({"statistics", "hidden", "known", "kept"})


class RewriteError(InternalError):
    """A rewritten graph is not what its rewrites say. Nothing of it has run."""


def prove_rewritten(captured: Captured, rewritten: Captured) -> list[Replaced]:
    """What each op of a rewrite in ``rewritten`` stands for, which is ``captured`` but for them.

    Raises:
        RewriteError: if it is not.
    """
    proof = _Proof(captured)
    for node in rewritten.graph.nodes:
        proof.node(node)
    return proof.replaced


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RewriteError(f"a rewritten step is not what was captured: {what}")


class _Proof:
    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.by_name = {node.name: node for node in captured.graph.nodes}
        self.heads = find_heads(captured)[0]
        self.claims: dict[fx.Node, Any] = {}  # a captured node, an element of the loss' call, a part, or _FREE
        self.replaced: list[Replaced] = []

    def node(self, node: fx.Node) -> None:
        """One more, in order."""
        if node.op == "output":
            self._output(node)
        elif node.op in ("placeholder", "get_attr"):
            like = self.by_name.get(node.name)
            _require(like is not None and (like.op, like.target) == (node.op, node.target), f"input {node.name}")
            self.claims[node] = like
        elif isinstance(node.target, OpOverload) and node.target.namespace == NAMESPACE:
            self._own(node, node.target)
        elif node.target is operator.getitem and isinstance(self.claims.get(arguments_of(node)[0]), tuple):
            kind, *rest = self.claims[arguments_of(node)[0]]
            _require(kind == "several", f"{node.name} takes an element of a value")
            self.claims[node] = rest[0][arguments_of(node)[1]]
        else:
            self._call(node)

    def _claim(self, value: Any) -> Any:
        return self.claims[value] if isinstance(value, fx.Node) else value

    def _call(self, node: fx.Node) -> None:
        """Definition 2; what reads what is free is free, and so is a constant that no captured call makes."""
        given = [self._claim(each) for each in tree_leaves((node.args, node.kwargs))]
        like = self.by_name.get(node.name)
        if like is not None and (like.op, like.target) == (node.op, node.target) and _FREE not in given:
            wanted = [_value_of(each) for each in tree_leaves((like.args, like.kwargs))]
            if len(wanted) == len(given) and all(map(_same, given, wanted)):
                self.claims[node] = _value_of(like)
                return
        if node.target is torch.ops.aten.view.default and self._shapes_sums(node):
            return
        constant = not any(isinstance(each, fx.Node) for each in tree_leaves((node.args, node.kwargs)))
        _require(constant or _FREE in given, f"{node.name} ({node.target}) is no call of the captured step")
        self.claims[node] = _FREE

    def _shapes_sums(self, node: fx.Node) -> bool:
        """The gradient of the bias, laid out as the captured sum."""
        claim = self._claim(arguments_of(node)[0])
        head = next((each for each in self.heads if claim == ("sums", each.loss)), None)
        if head is None or head.bias_gradient is None:
            return False
        self.claims[node] = head.bias_gradient
        return list(arguments_of(node)[1]) == list(head.bias_gradient.meta["val"].shape)

    def _own(self, node: fx.Node, target: OpOverload) -> None:
        """Definitions 3 and 4."""
        kind = str(target).removeprefix(f"{NAMESPACE}.").partition(".")[0]
        given = dict(zip((each.name for each in schema_of(target).arguments), arguments_of(node), strict=True))
        head = self._head_of(given, node)
        for name in _TAKES[kind]:
            claim = self._claim(given[name])
            wanted = (name, head.loss, given.get("guess")) if name in ("hidden", "known") else (name, head.loss)
            _require(claim == wanted, f"{node.name} reads a {name} that is not of its head and guess")
        if "tangent" in given:
            _require(_same(self._claim(given["tangent"]), _value_of(head.tangent)), f"{node.name} has another tangent")
            _require(self._claim(given["total_weight"]) == (head.loss, 1), f"{node.name} has another total weight")
        if kind == "backward_over_kept":
            _require(list(given["kept"].users) == [node], f"{node.name} writes over what others read")
            _require(given["trains"] is (head.weight_gradient is not None), f"{node.name} trains another weight")
            numbers = None if head.smoothing is None else head.smoothing.numbers
            _require(_same(self._claim(given["numbers"]), numbers), f"{node.name} smooths by other numbers")
        results = [self._result(name, head, given) for name in _GIVES[kind]]
        self.claims[node] = ("several", results) if len(results) > 1 else results[0]
        same = [
            each if name not in _OTHERWISE.get(kind, ()) else None
            for name, each in zip(_GIVES[kind], results, strict=True)
        ]
        same = [head.bias_gradient if each == ("sums", head.loss) else each for each in same]
        if found := replaced_by(node, self.claims, same, self.captured, head_sample(head.sizes, given, kind)):
            self.replaced.append(found)

    def _head_of(self, given: dict[str, Any], node: fx.Node) -> Head:
        """The head whose operands and constants these are."""
        for head in self.heads:
            operands = {
                "h": head.h,
                "wt": head.wt,
                "bias": head.bias,
                "labels": head.labels,
                "class_weights": head.class_weights,
            }
            constants = {
                "reduction": head.reduction,
                "ignore_index": head.ignore_index,
                "cut": list(head.sizes.cut),
                "between": head.sizes.between,
                "dtype": head.sizes.softmax,
                "smoothed": head.smoothing is not None,
            }
            if all(_same(self._claim(given[name]), each) for name, each in operands.items()) and all(
                given.get(name, each) == each for name, each in constants.items()
            ):
                return head
        raise RewriteError(f"a rewritten step is not what was captured: {node.name} is of no head")

    def _result(self, name: str, head: Head, given: dict[str, Any]) -> Any:
        if name in ("loss", "total_weight"):
            return head.loss, int(name == "total_weight")
        if name in ("hidden", "known"):
            return name, head.loss, given["guess"]
        if name in _PARTS:
            return name, head.loss
        if name == "row_sums":
            return ("nothing", head.loss) if head.smoothing is None else head.smoothing.sums
        if name == "bias_gradient":
            return "sums", head.loss
        return getattr(head, name) or ("nothing", head.loss)

    def _output(self, node: fx.Node) -> None:
        """Definition 5."""
        given, wanted = tree_leaves(node.args), list(self.captured.outputs)
        _require(len(given) == len(wanted), "another number of outputs")
        for position, (mine, theirs) in enumerate(zip(given, wanted, strict=True)):
            _require(_same(self._claim(mine), _value_of(theirs)), f"output {position} is another value")


def _value_of(value: Any) -> Any:
    """A captured node as what is claimed of it: elements of the loss' call by their place."""
    if isinstance(value, fx.Node) and value.target is operator.getitem:
        source, index = arguments_of(value)
        if isinstance(source, fx.Node) and source.target is torch.ops.aten.nll_loss_forward.default:
            return source, index
    return value


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, fx.Node) or isinstance(theirs, fx.Node):
        return mine is theirs
    return type(mine) is type(theirs) and mine == theirs

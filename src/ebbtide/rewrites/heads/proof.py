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

from ebbtide.capture.claims import Results, same
from ebbtide.capture.joint import Captured
from ebbtide.rewrites.heads.find import Head, find_heads
from ebbtide.rewrites.heads.ops import HEAD_OPS, PARTS, head_op
from ebbtide.rewrites.heads.samples import head_sample
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.rewrite_proof import RewriteProof
from ebbtide.torch_seams.dispatcher import OpOverload, schema_of
from ebbtide.torch_seams.graphs import arguments_of
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["prove_rewritten"]

_FREE = "free"


def prove_rewritten(captured: Captured, rewritten: Captured) -> list[Replaced]:
    """What each op of a rewrite in ``rewritten`` stands for, which is ``captured`` but for them.

    Raises:
        RewriteError: if it is not.
    """
    return _Proof(captured).replaced(rewritten)


class _Proof(RewriteProof):
    """Claims are captured nodes, elements of the loss' call by their place, parts, or ``_FREE``."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured)
        self.heads = find_heads(captured)[0]

    def value_of(self, value: Any) -> Any:
        """Elements of the loss' call by their place."""
        if isinstance(value, fx.Node) and value.target is operator.getitem:
            source, index = arguments_of(value)
            if isinstance(source, fx.Node) and source.target is torch.ops.aten.nll_loss_forward.default:
                return source, index
        return value

    def own(self, node: fx.Node) -> Any:
        """What the results of an op of a head claim (definitions 3 and 4)."""
        if isinstance(node.target, OpOverload) and (kind := head_op(node.target)):
            return self._result_of(node, node.target, kind)
        return None

    def other(self, node: fx.Node, like: fx.Node | None) -> Any:
        """What reads what is free is free, and so is a constant that no captured call makes."""
        if (sums := self._shaped_sums(node)) is not None:
            return sums
        given = [self.claim(each) for each in tree_leaves((node.args, node.kwargs))]
        constant = node.op == "call_function" and not node.all_input_nodes
        self.require(constant or _FREE in given, f"{node.name} ({node.target}) is no call of the captured step")
        return _FREE

    def _shaped_sums(self, node: fx.Node) -> fx.Node | None:
        """The gradient of the bias, if ``node`` lays it out as the captured sum."""
        if node.target is not torch.ops.aten.view.default:
            return None
        source, shape = arguments_of(node)
        head = next((each for each in self.heads if self.claim(source) == ("sums", each.loss)), None)
        gradient = None if head is None else head.bias_gradient
        return gradient if gradient is not None and list(shape) == list(gradient.meta["val"].shape) else None

    def _result_of(self, node: fx.Node, target: OpOverload, kind: str) -> Any:
        op = HEAD_OPS[kind]
        given = dict(zip((each.name for each in schema_of(target).arguments), arguments_of(node), strict=True))
        head = self._head_of(given, node)
        for name in op.takes:
            claim = self.claim(given[name])
            wanted = (name, head.loss, given.get("guess")) if name in ("hidden", "known") else (name, head.loss)
            self.require(claim == wanted, f"{node.name} reads a {name} that is not of its head and guess")
        if "tangent" in given:
            tangent = same(self.claim(given["tangent"]), self.value_of(head.tangent))
            self.require(tangent, f"{node.name} has another tangent")
            total = self.claim(given["total_weight"]) == (head.loss, 1)
            self.require(total, f"{node.name} has another total weight")
        for name in op.writes:
            self.require(list(given[name].users) == [node], f"{node.name} writes over what others read")
        if "trains" in given:
            self.require(given["trains"] is (head.weight_gradient is not None), f"{node.name} trains another weight")
            numbers = None if head.smoothing is None else head.smoothing.numbers
            self.require(same(self.claim(given["numbers"]), numbers), f"{node.name} smooths by other numbers")
        results = [self._result(name, head, given) for name in op.gives]
        alike = [head.bias_gradient if each == ("sums", head.loss) else each for each in results]
        self.stands_for(node, alike, head_sample(head.sizes, given, kind))
        return Results(results) if len(results) > 1 else results[0]

    def _head_of(self, arguments: dict[str, Any], node: fx.Node) -> Head:
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
                "logit_ops": head.sizes.logit_ops,
                "dtype": head.sizes.softmax,
                "smoothed": head.smoothing is not None,
            }
            if all(same(self.claim(arguments[name]), each) for name, each in operands.items()) and all(
                arguments.get(name, each) == each for name, each in constants.items()
            ):
                return head
        raise self.wrong(f"{node.name} is of no head")

    def _result(self, name: str, head: Head, arguments: dict[str, Any]) -> Any:
        if name in ("loss", "total_weight"):
            return head.loss, int(name == "total_weight")
        if name in ("hidden", "known"):
            return name, head.loss, arguments["guess"]
        if name in PARTS:
            return name, head.loss
        if name == "row_sums":
            return ("nothing", head.loss) if head.smoothing is None else head.smoothing.sums
        if name == "bias_gradient":
            return "sums", head.loss
        return getattr(head, name) or ("nothing", head.loss)

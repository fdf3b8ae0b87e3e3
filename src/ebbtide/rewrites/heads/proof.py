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

from collections.abc import Mapping
from typing import Any

from torch import fx

from ebbtide.capture.claims import Results
from ebbtide.capture.joint import Captured
from ebbtide.rewrites.heads.find import Head, find_heads
from ebbtide.rewrites.heads.ops import PARTS, HeadOp, op_of
from ebbtide.rewrites.heads.samples import head_sample
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.rewrite_proof import RewriteProof
from ebbtide.torch_seams.graphs import arguments_of
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["prove_rewritten"]

_FREE = object()
_FREELY_READ = frozenset({"rows", "columns", "count", "guess"})
"""What ops may read of any size, or of any value: a guess is settled by ops that read the same."""


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

    def of_rule(self, node: fx.Node) -> Any:
        """What the results of an op of a head claim (definitions 3 and 4)."""
        op = op_of(node.target)
        return None if op is None else self._result_of(node, op)

    def other(self, node: fx.Node, like: fx.Node | None) -> Any:
        """What reads what is free is free, and so is a constant that no captured call makes."""
        given = [self.claim(each) for each in tree_leaves((node.args, node.kwargs))]
        constant = node.op == "call_function" and not node.all_input_nodes
        self.require(constant or _FREE in given, f"{node.name} ({node.target}) is no call of the captured step")
        return _FREE

    def _result_of(self, node: fx.Node, op: HeadOp) -> Any:
        given = op.by_name(arguments_of(node))
        head = next((head for head in self.heads if all(self._is_read(head, name, given) for name in given)), None)
        self.require(head is not None, f"{node.name} is of no head, or reads what is not of its head and guess")
        assert head is not None
        for name in op.writes:
            self.require(list(given[name].users) == [node], f"{node.name} writes over what others read")
        results = [self._result(head, name, given) for name in op.gives]
        self.stands_for(node, results, head_sample(head.sizes, op, given))
        return Results(results) if len(results) > 1 else results[0]

    def _is_read(self, head: Head, name: str, given: Mapping[str, Any]) -> bool:
        """Whether an argument is what ops of ``head`` read by its name."""
        if name in _FREELY_READ:
            return True
        known = head.arguments
        wanted = self.value_of(known[name]) if name in known else self._result(head, name, given)
        claim = self.claim(given[name])
        return isinstance(claim, type(wanted)) and claim == wanted

    def _result(self, head: Head, name: str, given: Mapping[str, Any]) -> Any:
        """What a result of an op of ``head`` claims, of which others are ``given``."""
        if name in ("loss", "total_weight"):
            return head.loss, int(name == "total_weight")
        if name in PARTS:
            return name, head.loss, given["guess"] if name in ("hidden", "known") else None
        return getattr(head, name) or ("nothing", head.loss)

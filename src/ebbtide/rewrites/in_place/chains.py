"""Where a step can write over what dies: an op, and the ones after it that take its results over.

1. An *overwrite* is an op with an overwriting form (``rewrites.in_place.forms``) and an operand of it that is the whole
   of a buffer, as large and laid out as the result, which this op alone reads, once. Nobody loses anything by its
   disappearance: to keep it costs as much as to keep the result.
2. A *chain* is the op that makes such an operand, its *head*, and all overwrites of its results, one after the other.
   It runs where the head runs in captured order, so all else that its overwrites read is made before that. Head and
   overwrites are on one side of the boundary and may run again; no random number is drawn.
3. A chain needs what all of its ops read, at once. It is *lean* where that is no more than the largest of its ops needs
   by itself: then no schedule has a reason to want the ops apart.
4. Overwrites of one *kind* call the same op with arguments alike, and write over the same operand: what is known of one
   of them is known of all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.rewrites.in_place.forms import operands_of, overwriting_form
from ebbtide.step.program import Op, Program
from ebbtide.torch_seams.dispatcher import OpOverload
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["Chain", "Overwrite", "chains_of", "kind_of"]

_NOT_FRESH = frozenset({"lift_fresh_copy", "expand_copy", "_conj_physical", "conj_physical"})
"""Whose result may be less memory than it has elements, or memory of an argument."""


@dataclass(frozen=True)
class Overwrite:
    """An op that can write over an operand (definition 1).

    Attributes:
        op: index in the program.
        operand: which of the node's tensor arguments is written over (``forms.operands_of``).
        element: which result of the head it was at first; 0 where it has one.
        kind: definition 4.
    """

    op: int
    operand: int
    element: int
    kind: str


@dataclass
class Chain:
    """An op and what is done in the memory of its results (definition 2).

    Attributes:
        head: index of the op that comes first.
        overwrites: in captured order.
    """

    head: int
    overwrites: list[Overwrite] = field(default_factory=list[Overwrite])


def kind_of(step: Captured, op: int, operand: int) -> str:
    """What overwrites have in common of which one fact is known (definition 4)."""
    return f"operand {operand} of {step.calls[op].signature}"


def chains_of(step: Captured, *, lean: bool, kinds: Collection[str] | None = None) -> list[Chain]:
    """All chains of a step in captured order, each with one overwrite or more.

    Args:
        step: any.
        lean: whether they have to be (definition 3).
        kinds: of overwrites, if not all.
    """
    return list(_Finder(step, lean, kinds).chains())


class _Finder:
    def __init__(self, step: Captured, lean: bool, kinds: Collection[str] | None) -> None:
        self.step, self.lean, self.kinds = step, lean, kinds
        self.program: Program = step.program
        self.stays = self.program.pinned | self.program.copied_back
        self.chain_of: dict[int, tuple[Chain, int]] = {}  # by buffer: whose result it is, and which element
        self.needs: dict[int, int] = {}  # by head: bytes

    def chains(self) -> Iterator[Chain]:
        chains: list[Chain] = []
        for index, op in enumerate(self.program.ops):
            joined = self._join(index, op)
            if joined is None and self._may_be_head(op, self.step.op_nodes[index]):
                joined = Chain(index)
                chains.append(joined)
                self.needs[index] = self._bytes({*op.inputs, *op.outputs})
                for element, buffer in zip(self._elements(index), op.outputs, strict=True):
                    self.chain_of[buffer] = joined, element
        return (each for each in chains if each.overwrites)

    def _elements(self, op: int) -> list[int]:
        value = self.step.op_nodes[op].meta["val"]
        values = value if isinstance(value, list | tuple) else [value]
        return [k for k, each in enumerate(values) if isinstance(each, torch.Tensor)]

    def _may_be_head(self, op: Op, node: fx.Node) -> bool:
        target = node.target
        return (
            isinstance(target, OpOverload)
            and target.namespace == "aten"
            and str(target).split(".")[1] not in _NOT_FRESH
            and _repeats(op)
        )

    def _bytes(self, buffers: Collection[int]) -> int:
        return sum(self.program.buffers[each].bytes for each in buffers)

    def _join(self, index: int, op: Op) -> Chain | None:
        """The chain that op ``index`` is an overwrite of from now on, if there is one."""
        node = self.step.op_nodes[index]
        if overwriting_form(node.target) is None or not _repeats(op) or len(op.outputs) != 1:
            return None
        best: tuple[Chain, Overwrite] | None = None
        for operand, argument in enumerate(operands_of(node)):
            overwrite = self._overwrite(index, op, node, operand, argument)
            if overwrite is not None and (best is None or overwrite[0].head > best[0].head):
                best = overwrite
        if best is None:
            return None
        chain, overwrite = best
        over = self.step.buffer_of[operands_of(node)[overwrite.operand]]
        assert over is not None
        del self.chain_of[over]
        chain.overwrites.append(overwrite)
        self.needs[chain.head] = self._joint_need(chain, op)
        self.chain_of[op.outputs[0]] = chain, overwrite.element
        return chain

    def _overwrite(
        self, index: int, op: Op, node: fx.Node, operand: int, argument: fx.Node
    ) -> tuple[Chain, Overwrite] | None:
        buffer = self.step.buffer_of.get(argument)
        if buffer is None or buffer not in self.chain_of or buffer in self.stays:
            return None
        chain, element = self.chain_of[buffer]
        kind = kind_of(self.step, index, operand)
        if self.kinds is not None and kind not in self.kinds:
            return None
        head = chain.head
        if not (
            self._is_taken_over(index, op, node, argument, buffer) and self._comes_together(head, index, op, buffer)
        ):
            return None
        if self.lean:
            alone = self._bytes({*op.inputs, *op.outputs})
            if self._joint_need(chain, op) > max(self.needs[head], alone):
                return None
        return chain, Overwrite(index, operand, element, kind)

    def _is_taken_over(self, index: int, op: Op, node: fx.Node, argument: fx.Node, buffer: int) -> bool:
        """Whether ``op`` alone reads the whole of the operand (definition 1)."""
        if self.program.readers[buffer] != (index,):
            return False
        if sum(self.step.buffer_of.get(each) == buffer for each in _nodes_in(node)) != 1:
            return False
        mine, result = self.program.buffers[buffer], self.program.buffers[op.outputs[0]]
        value, made = argument.meta["val"], node.meta["val"]
        same = (value.shape, value.stride(), value.dtype) == (made.shape, made.stride(), made.dtype)
        lazy = value.is_conj() or value.is_neg()
        return (
            same
            and mine.whole
            and result.whole
            and mine.bytes == result.bytes
            and value.storage_offset() == 0
            and value.dtype.is_floating_point
            and not lazy
        )

    def _comes_together(self, head: int, index: int, op: Op, buffer: int) -> bool:
        """Whether ``op`` may run where the head does (definition 2)."""
        program = self.program
        if (head < program.boundary) != (index < program.boundary):
            return False
        if program.ops[head].reads_mutated != op.reads_mutated:
            return False
        late = head >= program.boundary
        for each in op.inputs:
            producer = program.buffers[each].producer
            if each != buffer and (not late if producer is None else producer >= head):
                return False
        return True

    def _joint_need(self, chain: Chain, op: Op) -> int:
        """What the chain needs with ``op`` as its last overwrite (definition 3)."""
        ops = [self.program.ops[chain.head], *(self.program.ops[each.op] for each in chain.overwrites), op]
        made = {each for one in ops for each in one.outputs}
        read = {each for one in ops for each in one.inputs}
        written_over = made & read
        return self._bytes((read | made) - written_over)


def _repeats(op: Op) -> bool:
    """Whether the op may run again as it is, and draws nothing."""
    return op.rerunnable and not op.random and not op.repeat and not op.once


def _nodes_in(node: fx.Node) -> list[fx.Node]:
    return [each for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, fx.Node)]

"""The proof that a step with chains is the step without them: nothing runs.

Every value of the new graph claims one of the old (``capture.claims``):
1. Of the parts of a chain (``rewrites.rewrite_proof``) the first is called as the old graph does, and each other one by
   its overwriting form: with the same constants, arguments that claim those of the old op, and one of them, which is
   also where it writes, that is what the part before has made, laid out as the old op reads it.
2. What is written over is read in the old step by that op alone, by one argument, and is no result of the step; the
   chain reads it no more.
3. Each result of the chain claims the last part that wrote there, or the first part's own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ebbtide.capture.claims import Results, same
from ebbtide.capture.joint import Captured
from ebbtide.rewrites.in_place.forms import InPlace, overwriting_form
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.rewrite_proof import CallProof, RewriteProof
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["prove_in_place"]


def prove_in_place(step: Captured, after: Captured) -> list[Replaced]:
    """What each chain in ``after`` stands for, which is ``step`` but for them.

    Raises:
        RewriteError: if it is not.
    """
    return _Proof(step, "a step that writes over what dies").replaced(after)


class _Proof(RewriteProof):
    """Claims are old nodes, and elements of old calls by their place."""

    def value_of(self, value: Any) -> Any:
        """Elements of a call by their place."""
        if isinstance(value, fx.Node) and value.target is operator.getitem:
            return arguments_of(value)
        return value

    def of_rule(self, node: fx.Node) -> Any:
        """What the results of a chain claim (definitions 1 to 3)."""
        if not isinstance(node.target, InPlace):
            return None
        results = _Chain(self, node, node.target.graph, node.args).results()
        self.stands_for(node, results)
        return results


class _Chain(CallProof):
    """The proof of one chain (definitions 1 to 3)."""

    def __init__(self, proof: RewriteProof, node: fx.Node, graph: fx.Graph, given: Sequence[Any]) -> None:
        super().__init__(proof, node, graph, given)
        self.step = proof.step
        self.layout: dict[fx.Node, tuple[Any, ...]] = {}  # of nodes that are a view of what a part made
        self.gone: set[Any] = set()

    def is_view(self, inner: fx.Node) -> bool:
        """Whether it is an element of the first part, or lays out what a part has made, from its first byte on."""
        if inner.target is operator.getitem:
            source, index = arguments_of(inner)
            self.require(self.claims[source] is self.parts[0], f"{inner} takes an element of another call")
            self.claims[inner] = self.parts[0], index
            return True
        if inner.target is not torch.ops.aten.as_strided.default:
            return False
        source, size, stride, offset = arguments_of(inner)
        if offset != 0 or source.op != "call_function":
            return False
        self.claims[inner], self.layout[inner] = self.claims[source], (tuple(size), tuple(stride))
        return True

    def call(self, inner: fx.Node, part: fx.Node) -> None:
        """The first part is called as it was, and each other by its overwriting form (definition 1)."""
        if part is self.parts[0]:
            self.require(inner.target is part.target, f"{inner} is not {part}")
            self.require(self.proof.congruent(inner, part, self.claims), f"{inner} reads other values than {part}")
            return
        form = overwriting_form(part.target)
        self.require(form is not None and inner.target is form[0], f"{inner} does not do what {part} does")
        assert form is not None
        kwargs = dict(inner.kwargs)
        over = kwargs.pop(form[1], None)
        self.require(isinstance(over, fx.Node), f"{inner} writes nowhere")
        assert isinstance(over, fx.Node)
        pairs = list(self.pairs(inner, part, (inner.args, kwargs), (part.args, part.kwargs)))
        read = [theirs for mine, theirs in pairs if mine is over]
        self.require(len(read) == 1 and isinstance(read[0], fx.Node), f"{inner} does not read once what it writes over")
        self._dies(over, read[0], part)
        for mine, theirs in pairs:
            if mine is not over:
                alike = mine.op == "placeholder" and same(self.claims[mine], self.proof.value_of(theirs))
                self.require(alike, f"{inner} reads other values than {part}")

    def _dies(self, over: fx.Node, read: fx.Node, part: fx.Node) -> None:
        """Require that nobody else reads ``over`` (definition 2), and that it is laid out as ``part`` reads it."""
        claim = self.claims[over]
        self.require(over.op == "call_function" and claim not in self.gone, f"{part.name} writes over what is given")
        self.gone.add(claim)
        source, index = claim if isinstance(claim, tuple) else (claim, None)
        made = source.meta["val"] if index is None else source.meta["val"][index]
        buffer = self.step.buffer_of.get(read)
        program = self.step.program
        ops = self.step.op_nodes
        self.require(buffer is not None, f"{part.name} writes over an input")
        assert buffer is not None
        element = (
            0 if index is None else [k for k, each in enumerate(source.meta["val"]) if each is not None].index(index)
        )
        maker = program.buffers[buffer].producer
        self.require(
            maker is not None and ops[maker] is source and program.ops[maker].outputs[element] == buffer,
            f"{part.name} writes over another buffer than it reads",
        )
        alone = [ops[each] for each in program.readers[buffer]] == [part]
        self.require(alone, f"others read what {part.name} writes over")
        self.require(buffer not in program.pinned | program.copied_back, f"{part.name} writes over a result")
        others = [each for each in part.all_input_nodes if self.step.buffer_of.get(each) == buffer]
        self.require(others == [read], f"{part.name} reads what it writes over by another view as well")
        value, result = read.meta["val"], part.meta["val"]
        layout = self.layout.get(over, (tuple(made.shape), tuple(made.stride())))
        for each in (value, result):
            alike = layout == (tuple(each.shape), tuple(each.stride())) and each.dtype == made.dtype
            whole = each.storage_offset() == 0 and each.numel() == made.numel()
            self.require(alike and whole, f"{part.name} is laid out otherwise")
        lazy = value.is_conj() or value.is_neg()
        self.require(program.buffers[buffer].whole and not lazy, f"{part.name} writes over a part of a buffer")

    def returned(self, made: Any) -> Any:
        """What the results claim (definition 3)."""
        first = self.parts[0]
        if isinstance(first.meta["val"], torch.Tensor):
            claim = self.claims[made]
            self.require(claim not in self.gone and claim is self.parts[-1], f"{self.node.name} returns {made}")
            return claim
        assert isinstance(made, tuple)
        self.require(len(made) == len(first.meta["val"]), f"{self.node.name} returns {len(made)} results")
        results: list[Any] = []
        for index, each in enumerate(made):
            claim = self.claims[each]
            self.require(claim not in self.gone, f"{self.node.name} returns what is written over")
            self.require(self._origin(each) == index, f"{self.node.name} returns results in another order")
            results.append(claim)
        return Results(results)

    def _origin(self, inner: Any) -> int:
        """Which result of the first part ``inner`` was."""
        while inner.target is not operator.getitem:
            kwargs = dict(inner.kwargs)
            form = overwriting_form(self.claims[inner].target) if self.claims[inner] in self.parts[1:] else None
            inner = kwargs[form[1]] if form is not None and form[1] in kwargs else arguments_of(inner)[0]
        return arguments_of(inner)[1]

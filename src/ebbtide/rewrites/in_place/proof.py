"""The proof that a step with chains is the step without them: nothing runs.

Every value of the new graph *claims* one of the old. By induction over the graph:
1. A call that both have claims its like: the same name, target and constants, and arguments that claim the arguments
   of that one.
2. The call of a chain names old ops, its *parts*. Its own graph calls the first as the old graph does, and each
   other one by its overwriting form: with the same constants, arguments that claim those of the old op, and one of
   them, which is also where it writes, that is what the part before has made, laid out as the old op reads it.
3. What is written over is read in the old step by that op alone, by one argument, and is no result of the step; the
   chain reads it no more.
4. No part draws a random number or has an effect: how often and when they run is the schedule's.
5. Each result of the chain claims the last part that wrote there, or the first part's own; each output of the graph
   claims the old one.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ebbtide.capture.claims import Results, same
from ebbtide.capture.joint import Captured
from ebbtide.capture.traits import draws_random, has_effect
from ebbtide.rewrites.in_place.forms import InPlace, overwriting_form
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.rewrite_proof import RewriteProof
from ebbtide.torch_seams.graphs import arguments_of
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["PARTS", "prove_in_place"]

PARTS = "ebbtide_parts"
"""Key in a chain's meta: the names of the ops that it is."""


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

    def own(self, node: fx.Node) -> Any:
        """What the results of a chain claim (definitions 2 to 5)."""
        if not isinstance(node.target, InPlace):
            return None
        results = _Chain(self, node, node.target).results()
        self.stands_for(node, results if isinstance(results, Results) else [results])
        return results


class _Chain:
    """The proof of one chain (definitions 2 to 5)."""

    def __init__(self, proof: _Proof, node: fx.Node, target: InPlace) -> None:
        self.proof, self.step = proof, proof.step
        self.require = proof.require
        self.node, self.target = node, target
        self.parts = [self._part(name) for name in node.meta[PARTS]]
        self.claims: dict[fx.Node, Any] = {}
        self.layout: dict[fx.Node, tuple[Any, ...]] = {}  # of nodes that are a view of what a part made
        self.gone: set[Any] = set()

    def _part(self, name: str) -> fx.Node:
        part = self.proof.by_name.get(name)
        self.require(part is not None and part.op == "call_function", f"{self.node.name} has a part {name}")
        assert part is not None
        self.require(not draws_random(part) and not has_effect(part), f"{name} is more than its result")
        return part

    def results(self) -> Any:
        """What the chain's results claim."""
        given = iter(self.node.args)
        first, *others = self.parts
        pending = [first, *others]
        result: Any = None
        for inner in self.target.graph.nodes:
            if inner.op == "placeholder":
                outer = next(given)
                self.require(isinstance(outer, fx.Node), f"{self.node.name} is given {outer}")
                self.claims[inner] = self.proof.claims[outer]  # type: ignore[index]
            elif inner.op == "output":
                result = self._output(inner)
            elif inner.target is operator.getitem:
                source, index = arguments_of(inner)
                self.require(self.claims[source] is first, f"{inner} takes an element of another call")
                self.claims[inner] = first, index
            elif inner.target is torch.ops.aten.as_strided.default and self._is_laid_out(inner):
                source, size, stride, _ = arguments_of(inner)
                self.claims[inner] = self.claims[source]
                self.layout[inner] = tuple(size), tuple(stride)
            else:
                self.require(bool(pending), f"{inner} is no part")
                part = pending.pop(0)
                self._call(inner, part, is_first=part is first)
                self.claims[inner] = part
        self.require(not pending and next(given, None) is None, f"{self.node.name} leaves out a part or an argument")
        return result

    def _is_laid_out(self, inner: fx.Node) -> bool:
        """Whether it lays out what a part has made, from its first byte on."""
        source, *_, offset = arguments_of(inner)
        return offset == 0 and source.op == "call_function"

    def _call(self, inner: fx.Node, part: fx.Node, *, is_first: bool) -> None:
        if is_first:
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
        given, wanted = tree_leaves((inner.args, kwargs)), tree_leaves((part.args, part.kwargs))
        self.require(len(given) == len(wanted), f"{inner} has other arguments than {part}")
        read = [theirs for mine, theirs in zip(given, wanted, strict=True) if mine is over]
        self.require(len(read) == 1 and isinstance(read[0], fx.Node), f"{inner} does not read once what it writes over")
        self._dies(over, read[0], part)
        for mine, theirs in zip(given, wanted, strict=True):
            if mine is not over:
                claim = self.claims[mine] if isinstance(mine, fx.Node) else mine
                self.require(same(claim, self.proof.value_of(theirs)), f"{inner} reads other values than {part}")
                self.require(not isinstance(mine, fx.Node) or mine.op == "placeholder", f"{inner} reads {mine}")

    def _dies(self, over: fx.Node, read: fx.Node, part: fx.Node) -> None:
        """Require that nobody else reads ``over`` (definition 3), and that it is laid out as ``part`` reads it."""
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

    def _output(self, inner: fx.Node) -> Any:
        """What the results claim (definition 5)."""
        (made,) = inner.args
        first = self.parts[0]
        if isinstance(first.meta["val"], torch.Tensor):
            claim = self.claims[made]  # type: ignore[index]
            self.require(claim not in self.gone and claim is self.parts[-1], f"{self.node.name} returns {made}")
            return claim
        assert isinstance(made, tuple)
        self.require(len(made) == len(first.meta["val"]), f"{self.node.name} returns {len(made)} results")
        results: list[Any] = []
        for index, each in enumerate(made):
            claim = self.claims[each]  # type: ignore[index]
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

"""The proof that a chain may write over what it makes, with the bits of its reference graph: nothing runs.

1. Each op that writes over an operand has an overwriting form, and is in the chain once.
2. What is written over is memory that an op of the chain has made, laid out as the result, all of it.
3. Nobody else reads it: neither in the chain, whatever views or elements lie between, nor in the captured step.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from ebbtide.rewrites.in_place.forms import InPlace, operands_of, overwriting_form
from ebbtide.rewrites.reference import parts_of
from ebbtide.rewrites.rewrite_proof import RewriteProof
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["check_overwrites"]


def check_overwrites(proof: RewriteProof, node: fx.Node, claims: Mapping[fx.Node, Any]) -> None:
    """Hold a chain against definitions 1 to 3.

    Args:
        proof: of the step that it is in.
        node: its call.
        claims: of the nodes of its reference graph.

    Raises:
        RewriteError: if one does not hold.
    """
    assert isinstance(node.target, InPlace)
    names = parts_of(node.target.reference)
    proof.require(len(set(names)) == len(names), f"{node.name} does something twice")
    for inner, operand in node.target.over.items():
        part = claims[inner]
        proof.require(overwriting_form(part.target) is not None, f"{part.name} cannot write over an operand")
        read, over = operands_of(part)[operand], operands_of(inner)[operand]
        reads = [each for each in tree_leaves((part.args, part.kwargs)) if each is read]
        proof.require(len(reads) == 1, f"{part.name} reads twice what it writes over")
        _dies(proof, read, part, claims[_maker_of(proof, over, inner, claims)])


def _maker_of(proof: RewriteProof, over: fx.Node, reader: fx.Node, claims: Mapping[fx.Node, Any]) -> fx.Node:
    """The op of the chain that makes ``over``, through what ``reader`` alone reads (definition 3)."""
    ops = set(proof.step.op_nodes)
    name = claims[reader].name
    while True:
        proof.require(over.op == "call_function", f"{name} writes over what is given")
        rivals = [each for each in over.users if each.target is not operator.getitem or each.args == reader.args]
        proof.require(rivals == [reader], f"others read what {name} writes over")
        if claims[over] in ops:
            return over
        over, reader = over.all_input_nodes[0], over


def _dies(proof: RewriteProof, read: fx.Node, part: fx.Node, maker: fx.Node) -> None:
    """Require that ``part`` alone reads the buffer of ``read``, all of it, which ``maker`` makes (definition 2)."""
    step, program = proof.step, proof.step.program
    buffer = step.buffer_of.get(read)
    producer = None if buffer is None else program.buffers[buffer].producer
    base = None if buffer is None else step.base_nodes[buffer]
    made = producer is not None and step.op_nodes[producer] is maker
    proof.require(made and base is not None, f"{part.name} writes over another buffer than it reads")
    assert buffer is not None
    assert base is not None
    alone = [step.op_nodes[each] for each in program.readers[buffer]] == [part]
    proof.require(alone, f"others read what {part.name} writes over")
    whole, value, result = base.meta["val"], read.meta["val"], part.meta["val"]
    alike = (value.shape, value.stride(), value.dtype) == (result.shape, result.stride(), result.dtype)
    proof.require(alike, f"{part.name} is laid out otherwise than what it writes over")
    entire = whole.numel() == value.numel() and whole.dtype == value.dtype and value.storage_offset() == 0
    lazy = value.is_conj() or value.is_neg()
    proof.require(entire and program.buffers[buffer].whole and not lazy, f"{part.name} writes over a part of a buffer")

"""A second backward, for updates that wait for the norm of all gradients: which of its values are made again.

1. A step that takes norms (``norm_ops``) keeps its gradients until the total norm. Its *recompute pass* makes some of
   the backward's values again behind that: an op of its own for each, named after the first one, so that planners place
   it and what it needs of the forward like everything else. Updates read what it makes.
2. Which ops those are is a *cut*: behind the total norm each gradient is kept, or its op runs again; what such an op
   reads of the backward is kept or made again likewise. All that is kept is there at the total norm together.
3. For a *price* of memory the cut of least cost is the solution of a linear program whose vertices are integral (each
   row is one implication): seconds of what is made again, as shares of those of the backward, and bytes of what is
   kept, as shares of those of all gradients times the price in hundredths.
4. Nothing is made again that draws random numbers, may not run twice, or is no tensor from the start of its memory.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured, reread, tensors_of
from ebbtide.cost.roofline import roofline_seconds
from ebbtide.optimizer.in_step.norm_ops import PartialNorm, total_norm_of
from ebbtide.planners.base import Interrupt
from ebbtide.planners.solvers.highs import Model, solve
from ebbtide.step.machine import machine_named
from ebbtide.torch_seams.fake_tensors import mode_of
from ebbtide.torch_seams.trees import tree_leaves, tree_map

__all__ = ["Cut", "cut_at", "cuts_of", "likes_in", "with_recompute_pass"]

PREFIX = "again_"
"""Begins the name of what is made again; that of the first one follows."""

PRICES = (10, 60, 400, 100_000)
"""Prices that cuts are looked for at (definition 3): from hardly anything made again to all that can be."""


@dataclass(frozen=True)
class Cut:
    """One way to have gradients behind the total norm (definition 2).

    Attributes:
        price: that it is the best for.
        again: ops that run again.
        kept_bytes: of the backward's values that are there at the total norm.
    """

    price: int
    again: frozenset[int]
    kept_bytes: int


_cuts: weakref.WeakKeyDictionary[fx.Graph, dict[int, Cut]] = weakref.WeakKeyDictionary()


def cuts_of(captured: Captured, prices: Sequence[int] = PRICES) -> Iterator[Cut]:
    """All that differ, that of the fewest ops first, but the one that keeps every gradient."""
    seen: set[frozenset[int]] = {frozenset()}
    for price in prices if total_norm_of(captured) is not None else ():
        cut = cut_at(captured, price)
        if cut.again not in seen:
            seen.add(cut.again)
            yield cut


def cut_at(captured: Captured, price: int) -> Cut:
    """The cut of least cost at a price (definition 3); ``captured`` takes their norms."""
    cuts = _cuts.setdefault(captured.graph, {})
    if price not in cuts:
        cuts[price] = _cut(captured, price)
    return cuts[price]


def _cut(captured: Captured, price: int) -> Cut:
    program = captured.program
    read = {captured.buffer_of[node] for each in _partial_norms(captured) for node in each.all_input_nodes}
    gradients = {each for each in read if each is not None}
    wanted = sorted(gradients)
    ops, buffers = _behind(captured, wanted)
    machine = machine_named("cpu")  # what counts is how much longer one op takes than another
    seconds = {i: roofline_seconds(captured.calls[i], machine) for i in ops}
    of_ops = sum(seconds.values()) or 1.0
    of_gradients = sum(program.buffers[b].bytes for b in wanted) or 1
    model = Model()
    runs = {i: model.column(seconds[i] / of_ops, upper=float(_may_be_made_again(captured, i))) for i in ops}
    there = {b: model.column(lower=float(b in gradients)) for b in buffers}
    kept = {b: model.column(price / 100 * program.buffers[b].bytes / of_gradients) for b in buffers}
    for b in buffers:
        producer = program.buffers[b].producer
        reruns = [(runs[producer], 1.0)] if producer is not None else []
        model.row("there", [(kept[b], 1.0), *reruns, (there[b], -1.0)], lower=0.0)
    for i in ops:
        for b in program.ops[i].inputs:
            if b in there:
                model.row("reads", [(there[b], 1.0), (runs[i], -1.0)], lower=0.0)
    values = solve(model, interrupt=Interrupt()).values
    assert values is not None, "to keep everything is a solution"
    again = frozenset(i for i in ops if values[runs[i]] > 0.5)
    return Cut(price, again, sum(program.buffers[b].bytes for b in buffers if values[kept[b]] > 0.5))


def _behind(captured: Captured, gradients: list[int]) -> tuple[list[int], list[int]]:
    """Ops of the backward that ``gradients`` are made of, and buffers that these make or read of it."""
    program = captured.program
    ops: set[int] = set()
    buffers: set[int] = set(gradients)
    waiting = list(gradients)
    while waiting:
        producer = program.buffers[waiting.pop()].producer
        if producer is None or producer in ops:
            continue
        ops.add(producer)
        for b in program.ops[producer].inputs:
            made_by = program.buffers[b].producer
            late = made_by is not None and program.after_boundary[made_by]  # a tangent is there anyway
            if late and b not in buffers:
                buffers.add(b)
                waiting.append(b)
    return sorted(ops), sorted(buffers)


def _partial_norms(captured: Captured) -> list[fx.Node]:
    return [node for node in captured.op_nodes if isinstance(node.target, PartialNorm)]


def _may_be_made_again(captured: Captured, index: int) -> bool:
    """Whether an op may run once more (definition 4)."""
    op = captured.program.ops[index]
    tensors = [each for each in tensors_of(captured.op_nodes[index].meta["val"]) if each is not None]
    whole = all(captured.program.buffers[b].whole for b in op.outputs)
    return op.rerunnable and not op.random and not op.repeat and whole and all(t.storage_offset() == 0 for t in tensors)


def with_recompute_pass(captured: Captured, cut: Cut) -> Captured:
    """``captured``, which takes norms of its gradients, with the ops of ``cut`` once more behind the total norm."""
    graph = fx.Graph(owning_module=captured.graph.owning_module)
    nodes: dict[fx.Node, fx.Node] = {}
    results = list(tree_leaves(graph.graph_copy(captured.graph, nodes)))
    ops = {node: index for index, node in enumerate(captured.op_nodes)}
    copies: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        if node.op != "call_function" or isinstance(node.target, PartialNorm):
            continue
        view = node not in ops and node in captured.buffer_of and any(each in copies for each in node.all_input_nodes)
        if ops.get(node) in cut.again or view:
            copy = graph.node_copy(node, lambda each: copies.get(each, nodes[each]))
            copy.name = PREFIX + node.name
            copy.meta = {**node.meta, "val": _like(node, copy, is_op=not view)}
            copies[node] = copy
    count = captured.forward_output_count
    for norm in _partial_norms(captured):
        target = norm.target
        assert isinstance(target, PartialNorm)
        results[count + target.position] = copies.get(norm.args[0], nodes[norm.args[0]])  # type: ignore[index, arg-type]
    read = {each for each in results if isinstance(each, fx.Node)}
    for copy in reversed(copies.values()):
        if not copy.users and copy not in read:
            graph.erase_node(copy)
    graph.output(tuple(results)).meta = dict(captured.graph.output_node().meta)
    return reread(captured, graph)


def _like(node: fx.Node, copy: fx.Node, *, is_op: bool) -> Any:
    """What ``copy`` makes: memory of its own for an op, a view of what it reads else."""
    value = node.meta["val"]
    if node.target is operator.getitem:
        source, element = copy.args
        return source.meta["val"][element]  # type: ignore[union-attr, index]
    first: Any = next(each for each in tensors_of(value) if each is not None)
    with mode_of(first), torch.no_grad():
        if is_op:
            return tree_map(_apart, value)
        args, kwargs = fx.map_arg((copy.args, copy.kwargs), lambda each: each.meta["val"])
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _apart(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.new_empty_strided(value.shape, value.stride())


def likes_in(captured: Captured) -> Mapping[int, int]:
    """By buffer that a recompute pass makes, the one of the first pass whose bytes it has to have."""
    ops = {node.name: captured.program.ops[i] for i, node in enumerate(captured.op_nodes)}
    found: dict[int, int] = {}
    for name, op in ops.items():
        if name.startswith(PREFIX) and (first := ops.get(name.removeprefix(PREFIX))) is not None:
            found |= dict(zip(op.outputs, first.outputs, strict=True))
    return found

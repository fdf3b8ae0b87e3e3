"""The rule that writes over what dies, where an elementwise op makes as much again (``rewrites.in_place.chains``).

Its two candidates differ in what they put together: all that can be, or only what a schedule loses nothing by. In the
first the unplanned step is lowest, in the second the floor.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.rewrites.facts import Fact
from ebbtide.rewrites.graphs import ChangedGraph
from ebbtide.rewrites.in_place.chains import Chain, Overwrite, chains_of, kind_of
from ebbtide.rewrites.in_place.facts import overwriting_fact
from ebbtide.rewrites.in_place.forms import InPlace, operands_of, overwriting_form
from ebbtide.rewrites.in_place.proof import check_overwrites
from ebbtide.rewrites.reference import ReferenceWriter
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.rewrite_proof import prove_references
from ebbtide.rewrites.rule import Rule
from ebbtide.step.rewrite import Rewrite

__all__ = ["InPlaceRule"]

RULE = "in-place"
LEAN, ALL = "lean", "all"


class InPlaceRule(Rule):
    """See ``rewrites.rule``."""

    name = RULE
    free = True

    def candidates(self, step: Captured) -> Iterator[tuple[Rewrite, ...]]:
        """What is lean, then all where that is more."""
        found = [_kinds(chains_of(step, lean=lean)) for lean in (True, False)]
        for form, kinds in zip((LEAN, ALL), found, strict=True):
            if kinds and (form == LEAN or kinds != found[0]):
                yield tuple(_rewrite(step, form, first, overwrites) for first, overwrites in kinds.values())

    def facts(self, step: Captured, rewrite: Rewrite) -> Sequence[Fact]:
        """That the op gives the same bits when it writes over its operand."""
        index = _op_at(step, rewrite)
        return [overwriting_fact(step.calls[index], rewrite["operand"])]

    def rewritten(self, step: Captured, rewrites: Sequence[Rewrite]) -> Captured:
        """All chains of the kinds that ``rewrites`` name."""
        kinds = {kind_of(step, _op_at(step, each), each["operand"]) for each in rewrites}
        changed = ChangedGraph(step)
        for chain in chains_of(step, lean=rewrites[0].form == LEAN, kinds=kinds):
            _write(changed, chain)
        return changed.captured()

    def prove(self, step: Captured, after: Captured) -> Sequence[Replaced]:
        """By the reference graphs of its chains, and by ``in_place.proof``."""
        return prove_references(step, after, InPlace, check_overwrites)

    def may_lower(self, step: Captured, op: int) -> bool:
        """Whether op number ``op`` can write over an operand."""
        return any(overwrite.op == op for chain in chains_of(step, lean=True) for overwrite in chain.overwrites)


def _kinds(chains: Sequence[Chain]) -> dict[str, tuple[Overwrite, int]]:
    """By kind, the first overwrite and how many there are."""
    overwrites = [each for chain in chains for each in chain.overwrites]
    counts = Counter(each.kind for each in overwrites)
    first: dict[str, Overwrite] = {}
    for each in sorted(overwrites, key=lambda each: each.op):
        first.setdefault(each.kind, each)
    return {kind: (overwrite, counts[kind]) for kind, overwrite in first.items()}


def _rewrite(step: Captured, form: str, overwrite: Overwrite, overwrites: int) -> Rewrite:
    op = step.program.ops[overwrite.op]
    (fact,) = [overwriting_fact(step.calls[overwrite.op], overwrite.operand)]
    settings = (("operand", overwrite.operand), ("places", overwrites))
    return Rewrite(RULE, op.name, op.source, form, settings, (fact.says,))


def _op_at(step: Captured, rewrite: Rewrite) -> int:
    for index, op in enumerate(step.program.ops):
        if op.name == rewrite.at:
            node = step.op_nodes[index]
            if overwriting_form(node.target) is None or not 0 <= rewrite["operand"] < len(operands_of(node)):
                break
            return index
    raise LookupError(f"it has no op at {rewrite.at} that can write over its operand")


def _write(changed: ChangedGraph, chain: Chain) -> None:
    """Put one chain in the place of its ops."""
    step, graph, nodes = changed.step, changed.graph, changed.nodes
    head = step.op_nodes[chain.head]
    target, given = _target_of(step, chain)
    for each in given:
        changed.hoist(each, head)
    old = nodes[head]
    last = {overwrite.element: step.op_nodes[overwrite.op] for overwrite in chain.overwrites}
    with graph.inserting_before(old):
        name = f"{step.op_nodes[chain.overwrites[-1].op].name}_in_place"
        args = tuple(nodes[each] for each in given)
        node = graph.create_node("call_function", target, args, name=name)
    node.meta = dict(old.meta)
    if isinstance(head.meta["val"], torch.Tensor):
        node.meta["val"] = last[0].meta["val"]
        made = {0: node}
    else:
        values = enumerate(old.meta["val"])
        node.meta["val"] = tuple(last[index].meta["val"] if index in last else each for index, each in values)
        for user in list(old.users):
            if user.args[1] not in last:
                user.update_arg(0, node)
        made = {element: changed.element(node, element, old.meta) for element in last}
    for element, overwrite in last.items():
        nodes[overwrite].replace_all_uses_with(made[element])
        nodes[overwrite] = made[element]


def _target_of(step: Captured, chain: Chain) -> tuple[InPlace, list[fx.Node]]:
    """The call that a chain is, and what it reads, each once: all arguments of its ops but those written over."""
    head = step.op_nodes[chain.head]
    ops = [(step.op_nodes[each.op], each) for each in chain.overwrites]
    read = [*head.all_input_nodes]
    for node, each in ops:
        written_over = operands_of(node)[each.operand]
        read += [one for one in node.all_input_nodes if one is not written_over]
    given = list(dict.fromkeys(read))
    writer = ReferenceWriter()
    writer.copies = {each: writer.given(each) for each in given}
    made, value = writer.copy(head), head.meta["val"]
    results: dict[int, fx.Node] = {}
    over: dict[fx.Node, int] = {}
    for node, each in ops:
        results[each.element] = copied = writer.copy(node)
        over[copied] = each.operand
    if isinstance(value, torch.Tensor):
        writer.graph.output(results[0])
    else:
        elements = range(len(value))
        others = {k: writer.graph.call_function(operator.getitem, (made, k)) for k in elements if k not in results}
        writer.graph.output(tuple((results | others)[k] for k in elements))
    return InPlace(writer.graph, over), given

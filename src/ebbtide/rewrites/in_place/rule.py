"""The rule that writes over what dies, where an elementwise op makes as much again (``rewrites.in_place.chains``).

Its two candidates differ in what they put together: all that can be, or only what a schedule loses nothing by. In the
first the unplanned step is lowest, in the second the floor.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.rewrites.facts import Fact
from ebbtide.rewrites.graphs import ChangedGraph, text_of
from ebbtide.rewrites.in_place.chains import Chain, Overwrite, chains_of, kind_of, operands_of
from ebbtide.rewrites.in_place.facts import overwriting_fact
from ebbtide.rewrites.in_place.forms import InPlace, overwriting_form
from ebbtide.rewrites.in_place.proof import prove_in_place
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.rewrite_proof import PARTS
from ebbtide.rewrites.rule import Estimate, Rule
from ebbtide.step.program import Program
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

    def estimates(
        self, step: Captured, rewrites: Sequence[Rewrite], program: Program, after: Captured
    ) -> Mapping[str, Estimate]:
        """The sum of what the ops take of a chain."""
        known = {op.name: op for op in program.ops}
        found: dict[str, Estimate] = {}
        for op, node in zip(after.program.ops, after.op_nodes, strict=True):
            if isinstance(node.target, InPlace):
                parts = [known[each] for each in node.meta[PARTS]]
                workspace = max(each.workspace_bytes for each in parts)
                found[op.name] = Estimate(sum(each.seconds for each in parts), workspace)
        return found

    def prove(self, step: Captured, after: Captured) -> Sequence[Replaced]:
        """By ``rewrites.in_place.proof``."""
        return prove_in_place(step, after)

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
    given = _inputs_of(step, chain)
    for each in given:
        changed.hoist(each, head)
    old = nodes[head]
    last = {overwrite.element: step.op_nodes[overwrite.op] for overwrite in chain.overwrites}
    with graph.inserting_before(old):
        name = f"{step.op_nodes[chain.overwrites[-1].op].name}_in_place"
        args = tuple(nodes[each] for each in given)
        node = graph.create_node("call_function", _target(step, chain, given), args, name=name)
    ops = [chain.head, *(overwrite.op for overwrite in chain.overwrites)]
    node.meta = {**old.meta, PARTS: tuple(step.program.ops[each].name for each in ops)}
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


def _inputs_of(step: Captured, chain: Chain) -> list[fx.Node]:
    """What a chain reads, each once: all arguments of its ops but those that they write over."""
    head = step.op_nodes[chain.head]
    found = [*head.all_input_nodes]
    for overwrite in chain.overwrites:
        node = step.op_nodes[overwrite.op]
        over = operands_of(node)[overwrite.operand]
        found += [each for each in node.all_input_nodes if each is not over]
    return list(dict.fromkeys(found))


def _target(step: Captured, chain: Chain, sources: Sequence[fx.Node]) -> InPlace:
    """The call that a chain is."""
    graph = fx.Graph()
    inputs = {node: graph.placeholder(f"given_{index}") for index, node in enumerate(sources)}
    words = {node: f"%{index}" for index, node in enumerate(sources)}
    head = step.op_nodes[chain.head]
    args, kwargs = fx.map_arg((head.args, head.kwargs), inputs.__getitem__)
    assert callable(head.target)
    made = graph.call_function(head.target, args, kwargs)
    says = [text_of(head.target, head.args, head.kwargs, words)]
    value = head.meta["val"]
    single = isinstance(value, torch.Tensor)
    results = {0: made} if single else {k: graph.call_function(operator.getitem, (made, k)) for k in range(len(value))}
    layouts = {0: value} if single else dict(enumerate(value))
    for overwrite in chain.overwrites:
        node = step.op_nodes[overwrite.op]
        over = operands_of(node)[overwrite.operand]
        result = results[overwrite.element]
        wanted, had = over.meta["val"], layouts[overwrite.element]
        laid_out = ""
        if (wanted.shape, wanted.stride()) != (had.shape, had.stride()):
            layout = (list(wanted.shape), list(wanted.stride()), 0)
            result = graph.call_function(torch.ops.aten.as_strided.default, (result, *layout))
            laid_out = f" as {layout[0]}:{layout[1]}"
        args, kwargs = fx.map_arg((node.args, node.kwargs), {**inputs, over: result}.__getitem__)
        form = overwriting_form(node.target)
        assert form is not None
        results[overwrite.element] = graph.call_function(form[0], args, {**kwargs, form[1]: result})
        layouts[overwrite.element] = node.meta["val"]
        says.append(text_of(node.target, node.args, node.kwargs, {**words, over: f"_{overwrite.element}{laid_out}"}))
    graph.output(results[0] if single else tuple(results.values()))
    return InPlace(graph, f"in_place[{'; '.join(says)}]")

"""What may take the place of a head, and the joint graph with it there.

1. ``kept``: one N x V buffer from forward to backward; as many products as eager's.
2. ``guessed``: nothing of N x V; the forward makes the gradient of the hidden states by a guess, and a share of the
   logits' gradient where that is worth it; one product more, less that share. With a frozen weight none more.
3. ``rows``: nothing of N x V, no guess; two products more, with a frozen weight one.

Where labels are smoothed there is ``kept`` alone.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.rewrites.facts import Fact
from ebbtide.rewrites.graphs import ChangedGraph, after_tangents
from ebbtide.rewrites.heads.facts import column_facts, row_facts, softmax_facts
from ebbtide.rewrites.heads.find import Head, head_at
from ebbtide.rewrites.heads.kernels import GUESSED, HEAD_OPS, KEPT, ROWS
from ebbtide.rewrites.heads.slices import known_columns
from ebbtide.rewrites.spans import LEAST
from ebbtide.step.rewrite import Rewrite
from ebbtide.torch_seams.fake_tensors import mode_of

__all__ = ["RULE", "facts_of", "forms_of", "known_count", "larger_slices_of", "rewritten"]

RULE = "linear-cross-entropy"
_PARTS = (4, 16, 64)
"""Slices take one over each of these of N x V at a time."""
_PERCENTS = (75, 50, 25)
"""Percent of the logits' gradient that ``guessed`` may keep of its own forward."""
_MOST_GUESSED = 16
"""Elements of what a guess is computed through: a division by a count, a scale."""


def forms_of(head: Head) -> Iterator[Rewrite]:
    """All that may take the place of ``head``, the cheapest kinds first."""
    trained = head.weight_gradient is not None
    for part in _PARTS:
        rows = max(LEAST, head.sizes.rows // part)
        columns = max(LEAST, head.sizes.vocabulary // part)
        yield _rewrite(head, KEPT, rows=rows)
        if head.row_sums is not None:
            continue
        if _guess_cone(head) is not None:
            for percent in (*(_PERCENTS if trained else ()), 0):
                yield _rewrite(head, GUESSED, rows=rows, columns=columns if trained else 0, percent=percent)
        yield _rewrite(head, ROWS, rows=rows, columns=columns if trained else 0)


def larger_slices_of(head: Head, rewrite: Rewrite) -> Iterator[Rewrite]:
    """``rewrite`` with larger slices of rows, of columns or of both, what takes the least memory first.

    Kernels that sum otherwise for few rows than for many do not for few columns, and the other way round.
    """
    settings = dict(rewrite.settings)
    whole = {"rows": head.sizes.rows, "columns": head.sizes.vocabulary}
    axes = [name for name in whole if settings.get(name)]
    sizes = [_doubled(settings[name], max(LEAST, whole[name] // _PARTS[0])) for name in axes]

    def share(sizes: tuple[int, ...]) -> float:
        return sum(size / whole[name] for name, size in zip(axes, sizes, strict=True))

    for found in sorted(itertools.product(*sizes), key=share)[1:]:
        made = settings | dict(zip(axes, found, strict=True))
        yield _rewrite(head, rewrite.form, **made)


def _doubled(size: int, most: int) -> list[int]:
    """``size``, twice that and so on, up to ``most``."""
    found = [size]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found


def _rewrite(head: Head, form: str, **settings: int) -> Rewrite:
    made = Rewrite(RULE, head.loss.name, head.name, form, tuple(settings.items()))
    return Rewrite(RULE, made.at, made.where, form, made.settings, tuple(each.says for each in facts_of(head, made)))


def facts_of(head: Head, rewrite: Rewrite) -> list[Fact]:
    """What ``rewrite`` takes for granted of the kernels."""
    settings = dict(rewrite.settings)
    rows, columns = settings["rows"], settings.get("columns", 0)
    facts = list(softmax_facts(head.sizes, rows, [columns] if columns else []))
    if rewrite.form != KEPT:
        facts += row_facts(head.sizes, rows)
        facts += column_facts(head.sizes, columns) if columns else ()
    return facts


def known_count(head: Head, rewrite: Rewrite) -> int:
    """Of how many columns the logits' gradient is kept by the forward of ``rewrite``."""
    settings = dict(rewrite.settings)
    columns, share = settings.get("columns", 0), settings.get("percent", 0) / 100
    return known_columns(head.sizes.vocabulary, share, columns) if columns else 0


def rewritten(captured: Captured, rewrite: Rewrite) -> Captured:
    """``captured`` with ``rewrite`` in it; the one that is given is left as it is."""
    changed = ChangedGraph(captured)
    _Writer(changed, head_at(captured, rewrite), rewrite).write()
    return changed.captured()


def _guess_cone(head: Head) -> list[fx.Node] | None:
    """The tangents of the step and what computes the loss' gradient from them; ``None`` if that cannot be guessed.

    What it reads besides has to be there where the forward's op goes.
    """
    cone: list[fx.Node] = []
    seen: set[fx.Node] = set()
    place = {node: index for index, node in enumerate(head.loss.graph.nodes)}
    there = place[_place_of(head)]
    late = after_tangents(head.loss.graph)

    def visit(node: fx.Node) -> bool:
        if node in seen:
            return True
        seen.add(node)
        if node not in late:
            return place[node] < there
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.numel() > _MOST_GUESSED:
            return False
        made = value.dtype.is_floating_point if node.op == "placeholder" else all(map(visit, node.all_input_nodes))
        cone.extend([node] if made else [])
        return made

    return cone if visit(head.arguments["tangent"]) else None


def _place_of(head: Head) -> fx.Node:
    """Before this node goes the forward's op: before what reads the loss and before all of the backward."""
    readers = {reader for element in head.loss.users for reader in element.users}
    readers |= set() if head.row_sums is None else set(head.row_sums.users)
    late = after_tangents(head.loss.graph)
    later = False
    for node in head.loss.graph.nodes:
        later |= node is head.loss
        if later and (node in readers or (node.op == "call_function" and node in late)):
            return node
    return head.loss


class _Writer:
    """Puts the ops of a form into a copy of the joint graph.

    Args:
        changed: the copy.
        head: of the captured graph.
        rewrite: of ``head``.
    """

    def __init__(self, changed: ChangedGraph, head: Head, rewrite: Rewrite) -> None:
        self.changed, self.graph, self.nodes, self.head = changed, changed.graph, changed.nodes, head
        self.form, self.rewrite = rewrite.form, rewrite
        known = {**head.arguments, **dict(rewrite.settings)}
        self.values: dict[str, Any] = {
            name: self.nodes[each] if isinstance(each, fx.Node) else each for name, each in known.items()
        }

    def write(self) -> None:
        """All of it."""
        self._write_kept() if self.form == KEPT else self._by_slices()

    # -- the forms ------------------------------------------------------------------------------------------------

    def _write_kept(self) -> None:
        self._forward("forward_that_keeps")
        if self.head.row_sums is not None:
            self.nodes[self.head.row_sums].replace_all_uses_with(self.values["row_sums"])
        self._gradients("backward_over_kept", self.head.steps_back[0])

    def _by_slices(self) -> None:
        """``guessed`` and ``rows``: the one with a guess, and a share of columns that are known by it."""
        guess = self._guess() if self.form == GUESSED else None
        self.values |= {"guess": guess, "count": known_count(self.head, self.rewrite)}
        self._forward("forward_by_rows")
        self._gradients("backward_by_rows" if guess is None else "settle_guess", self.head.hidden_gradient)
        self._gradients("backward_by_columns", self.head.weight_gradient)

    # -- parts of them --------------------------------------------------------------------------------------------

    def _forward(self, kind: str) -> None:
        """The op in the place of the loss."""
        loss = self.nodes[self.head.loss]
        self._issue(kind, self.nodes.get(_place_of(self.head), loss), self.head.loss)
        for user in list(loss.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(self.values["total_weight" if user.args[1] else "loss"])

    def _guess(self) -> fx.Node:
        """The loss' gradient where that of each output is 1, made in the forward."""
        before = self.nodes.get(_place_of(self.head), self.nodes[self.head.loss])
        cone = _guess_cone(self.head)
        assert cone is not None
        copies = dict(self.nodes)
        for node in cone:
            with self.graph.inserting_before(before):
                if node.op == "placeholder":
                    value = node.meta["val"]
                    ones, kind = (list(value.shape), 1.0), {"dtype": value.dtype, "device": value.device}
                    made = self.graph.call_function(torch.ops.aten.full.default, ones, kind)
                    made.meta = dict(self.head.loss.meta)
                else:
                    made = self.graph.node_copy(node, copies.__getitem__)
            self._renew(made)
            copies[node] = made
        return copies[self.head.arguments["tangent"]]

    def _gradients(self, kind: str, like: fx.Node | None) -> None:
        """An op in the place of what makes the gradients that it gives, from the line of ``like``; none without."""
        if like is None:
            return
        old = {name: node for name in HEAD_OPS[kind].gives if (node := getattr(self.head, name)) is not None}
        order = {node: index for index, node in enumerate(self.graph.nodes)}
        self._issue(kind, min((self.nodes[each] for each in old.values()), key=order.__getitem__), like)
        for name, node in old.items():
            self.nodes[node].replace_all_uses_with(self.values[name])

    def _renew(self, node: fx.Node) -> None:
        """Give ``node`` a value of its own, made of those that it reads."""
        node.meta = dict(node.meta)
        with mode_of(self.head.product.meta["val"]), torch.no_grad():
            given, options = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            node.meta["val"] = node.target(*given, **options)  # type: ignore[operator]

    def _issue(self, kind: str, before: fx.Node, like: fx.Node) -> None:
        """A call of an op right before ``before``, from the same line and module as ``like``; its results by name.

        A result that takes the place of a captured value has the captured one's, of which views are known.
        """
        op, head = HEAD_OPS[kind], self.head
        call = tuple(self.values[name] for name in op.arguments)
        with self.graph.inserting_before(before):
            node = self.graph.call_function(op.target, call)
        node.meta = dict(like.meta)
        with mode_of(head.product.meta["val"]), torch.no_grad():
            made = op.target(*fx.map_arg(call, lambda each: each.meta["val"]))
        captured: dict[str, Any] = dict(zip(("loss", "total_weight"), head.loss.meta["val"], strict=True))
        for name in ("row_sums", "hidden_gradient", "weight_gradient", "bias_gradient"):
            if (each := getattr(head, name)) is not None:
                captured[name] = each.meta["val"]
        if len(op.gives) == 1:
            node.meta["val"] = captured.get(op.gives[0], made)
            self.values[op.gives[0]] = node
        else:
            node.meta["val"] = tuple(captured.get(name, each) for name, each in zip(op.gives, made, strict=True))
            self.values |= {name: self.changed.element(node, k, node.meta) for k, name in enumerate(op.gives)}

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

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.errors import InternalError
from ebbtide.rewrites.facts import Fact
from ebbtide.rewrites.graphs import ChangedGraph, after_tangents
from ebbtide.rewrites.heads.facts import column_facts, row_facts, softmax_facts
from ebbtide.rewrites.heads.find import VIEWS, Head, find_heads
from ebbtide.rewrites.heads.kernels import GUESSED, HEAD_OPS, KEPT, ROWS
from ebbtide.rewrites.heads.slices import known_columns
from ebbtide.rewrites.spans import LEAST
from ebbtide.step.rewrite import Rewrite
from ebbtide.torch_seams.aot import is_tangent
from ebbtide.torch_seams.dispatcher import OpOverload
from ebbtide.torch_seams.fake_tensors import mode_of

__all__ = ["RULE", "facts_of", "forms_of", "larger_slices_of", "rewritten"]

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
        if head.smoothing is not None:
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


def rewritten(captured: Captured, rewrite: Rewrite) -> Captured:
    """``captured`` with ``rewrite`` in it; the one that is given is left as it is."""
    head = next((each for each in find_heads(captured)[0] if each.loss.name == rewrite.at), None)
    if head is None:
        raise InternalError(f"the captured step has no head at {rewrite.at}")
    changed = ChangedGraph(captured)
    _Writer(changed, head, rewrite).write()
    return changed.captured()


def _guess_cone(head: Head) -> list[fx.Node] | None:
    """What computes the loss' gradient from the tangents of the step, in order; ``None`` if that cannot be guessed.

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
        if node.op == "placeholder":
            return value.dtype.is_floating_point
        if not all(map(visit, node.all_input_nodes)):
            return False
        cone.append(node)
        return True

    return cone if visit(head.tangent) else None


def _place_of(head: Head) -> fx.Node:
    """Before this node goes the forward's op: before what reads the loss and before all of the backward."""
    readers = {reader for element in head.loss.users for reader in element.users}
    readers |= set() if head.smoothing is None else set(head.smoothing.sums.users)
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
        self.form = rewrite.form
        known = head.arguments | dict(rewrite.settings)
        self.values = {name: self.nodes[each] if isinstance(each, fx.Node) else each for name, each in known.items()}

    def write(self) -> None:
        """All of it."""
        {KEPT: self._write_kept, GUESSED: self._guessed, ROWS: self._rows}[self.form]()

    # -- the forms ------------------------------------------------------------------------------------------------

    def _write_kept(self) -> None:
        self._forward("forward_that_keeps")
        if self.head.smoothing is not None:
            self._replace(self.head.smoothing.sums, self.values["row_sums"])
        self._gradients("backward_over_kept", self.head.gradient)

    def _rows(self) -> None:
        self._forward("forward_by_rows")
        self._gradients("backward_by_rows", self.head.hidden_gradient)
        self._gradients("backward_by_columns", self.head.weight_gradient)

    def _guessed(self) -> None:
        columns, share = self.values["columns"], self.values["percent"] / 100
        count = known_columns(self.head.sizes.vocabulary, share, columns) if columns else 0
        self.values |= {"guess": self._guess(), "count": count}
        self._forward("forward_with_guess")
        self._gradients("settle_guess", self.head.hidden_gradient)
        self._gradients("backward_by_other_columns" if count else "backward_by_columns", self.head.weight_gradient)

    # -- parts of them --------------------------------------------------------------------------------------------

    def _forward(self, kind: str) -> None:
        """The op in the place of the loss."""
        loss = self.nodes[self.head.loss]
        self._issue(kind, self.nodes.get(_place_of(self.head), loss), self.head.loss)
        for user in list(loss.users):
            assert user.target is operator.getitem
            new = self.values["total_weight" if user.args[1] else "loss"]
            user.replace_all_uses_with(new)
            self._renew_views(new)

    def _guess(self) -> fx.Node:
        """The loss' gradient where that of each output is 1, made in the forward."""
        before = self.nodes.get(_place_of(self.head), self.nodes[self.head.loss])
        cone = _guess_cone(self.head)
        assert cone is not None
        copies: dict[fx.Node, fx.Node] = {}
        mode = mode_of(self.head.product.meta["val"])

        def copy_of(node: fx.Node) -> fx.Node:
            if node in copies:
                return copies[node]
            if node.op == "placeholder" and is_tangent(node):
                value = node.meta["val"]
                with self.graph.inserting_before(before):
                    made = self.graph.call_function(
                        torch.ops.aten.full.default,
                        (list(value.shape), 1.0),
                        {"dtype": value.dtype, "device": value.device},
                    )
                made.meta = dict(self.nodes[self.head.loss].meta)
                with mode:
                    made.meta["val"] = torch.full(value.shape, 1.0, dtype=value.dtype, device=value.device)
                copies[node] = made
                return made
            return self.nodes[node]

        for node in cone:
            with self.graph.inserting_before(before):
                made = self.graph.node_copy(node, copy_of)
            self._renew(made)
            copies[node] = made
        return copies.get(self.head.tangent) or copy_of(self.head.tangent)

    def _gradients(self, kind: str, like: fx.Node | None) -> None:
        """An op in the place of what makes the gradients that it gives, from the line of ``like``; none without."""
        if like is None:
            return
        old = {name: getattr(self.head, name) for name in HEAD_OPS[kind].gives}
        before = min((self.nodes[each] for each in old.values() if each is not None), key=self._place)
        self._issue(kind, before, like)
        for name, node in old.items():
            if name == "bias_gradient":
                self._replace_sums(self.values[name])
            else:
                self._replace(node, self.values[name])

    def _replace_sums(self, sums: fx.Node) -> None:
        if self.head.bias_gradient is None:
            return
        shape = list(self.head.bias_gradient.meta["val"].shape)
        with self.graph.inserting_after(sums):
            shaped = self.graph.call_function(torch.ops.aten.view.default, (sums, shape))
        shaped.meta = dict(sums.meta)
        with mode_of(sums.meta["val"]):
            shaped.meta["val"] = torch.ops.aten.view.default(sums.meta["val"], shape)
        self._replace(self.head.bias_gradient, shaped)

    def _replace(self, old: fx.Node | None, new: fx.Node) -> None:
        if old is None:
            return
        self.nodes[old].replace_all_uses_with(new)
        self._renew_views(new)

    def _renew_views(self, node: fx.Node) -> None:
        """Give views of ``node`` values that are views of its value: what shares memory is told by these."""
        for user in node.users:
            value = user.meta.get("val")
            views = user.target in VIEWS or (isinstance(user.target, OpOverload) and user.target.is_view)
            if not views or not isinstance(value, torch.Tensor):
                continue
            self._renew(user)
            self._renew_views(user)

    def _renew(self, node: fx.Node) -> None:
        """Give ``node`` a value of its own, made of those that it reads."""
        node.meta = dict(node.meta)
        with mode_of(self.head.product.meta["val"]), torch.no_grad():
            given, options = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            node.meta["val"] = node.target(*given, **options)  # type: ignore[operator]

    def _place(self, node: fx.Node) -> int:
        return next(index for index, each in enumerate(self.graph.nodes) if each is node)

    def _issue(self, kind: str, before: fx.Node, like: fx.Node) -> None:
        """A call of an op right before ``before``, from the same line and module as ``like``; its results by name."""
        op = HEAD_OPS[kind]
        call = tuple(self.values[name] for name in op.arguments)
        with self.graph.inserting_before(before):
            node = self.graph.call_function(op.target, call)
        node.meta = dict(like.meta)
        with mode_of(self.head.product.meta["val"]), torch.no_grad():
            node.meta["val"] = op.target(*fx.map_arg(call, lambda each: each.meta["val"]))
        made = (
            [node]
            if len(op.gives) == 1
            else [self.changed.element(node, index, node.meta) for index in range(len(op.gives))]
        )
        self.values |= zip(op.gives, made, strict=True)

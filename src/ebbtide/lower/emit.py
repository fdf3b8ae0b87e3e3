"""One of the two graphs while it is written: which copy of each joint value is at hand, and its views.

Views are never saved or scheduled. They are issued right before their first reader and forgotten when their
buffer is freed or made again, so that no stale view keeps a buffer alive. A chain of views on one of our own
buffers is issued as one ``as_strided`` with the sizes, strides and offset of its end, or not at all where the
end is the buffer itself: kernels see the same tensor either way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from ebbtide.capture.joint import Captured
from ebbtide.capture.traits import keeps_storage
from ebbtide.cost.call import extent_of
from ebbtide.lower.targets import arrive, offload, reload, settle

__all__ = ["CLAIM", "MAKES", "Emitter", "is_whole", "twice_transposed"]

CLAIM = "ebbtide_claim"
"""Key in a lowered node's meta: the joint node whose value it holds (read by the proof)."""
MAKES = "ebbtide_makes"
"""Key in a lowered node's meta: the buffer whose copy the node is (read by the fingerprints)."""

_aten = torch.ops.aten
# Views that only change sizes, strides and offset; any other (dtype views, conjugates) is issued as captured.
_STRIDED_VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.expand.default,
        _aten.unsqueeze.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.unbind.int,
        _aten.chunk.default,
        _aten.alias.default,
        _aten.detach.default,
        _aten.as_strided.default,
        operator.getitem,
    }
)


def is_whole(base: fx.Node) -> bool:
    """Whether the value is all of its storage, so that offsets into it can be told from its fake value.

    An op that keeps the storage of its argument keeps an offset too, of which torch's cache of fake tensors may know
    nothing.
    """
    tensor = base.meta["val"]
    if keeps_storage(base):
        return False
    return tensor.storage_offset() == 0 and extent_of(tensor.shape, tensor.stride()) == tensor.numel()


def twice_transposed(node: fx.Node) -> fx.Node | None:
    """The tensor of which ``node`` is the transpose of the transpose: itself, however it lies in memory.

    So is a weight that the backward of a linear layer reads.
    """
    inner = node.args[0] if node.target is _aten.t.default else None
    if not isinstance(inner, fx.Node) or inner.target is not _aten.t.default:
        return None
    source = inner.args[0]
    assert isinstance(source, fx.Node)
    return source


@dataclass
class Emitter:
    """Writes one graph in schedule order.

    Attributes:
        joint: what is lowered.
        graph: the graph being written.
        missing: asked for the value of a base node or forward input that this graph has no copy of.
        slot_of: per buffer that is moved, its slot.
    """

    joint: Captured
    missing: Callable[[fx.Node], fx.Node]
    graph: fx.Graph = field(default_factory=fx.Graph)
    slot_of: Mapping[int, int] = field(default_factory=dict[int, int])
    _coming: dict[fx.Node, fx.Node] = field(default_factory=dict["fx.Node", "fx.Node"])  # reloaded and not read yet
    _copies: dict[fx.Node, fx.Node] = field(default_factory=dict["fx.Node", "fx.Node"])
    _views_of: dict[int, list[fx.Node]] = field(default_factory=dict[int, "list[fx.Node]"])

    def bind(self, joint_node: fx.Node, copy: fx.Node) -> None:
        """``copy`` now holds the value of ``joint_node``."""
        copy.meta[CLAIM] = joint_node
        copy.meta["val"] = joint_node.meta["val"]
        self._copies[joint_node] = copy

    def has(self, joint_node: fx.Node) -> bool:
        """Whether a copy of ``joint_node`` is at hand, or on its way."""
        return joint_node in self._copies or joint_node in self._coming

    def value(self, joint_node: fx.Node) -> fx.Node:
        """The copy of ``joint_node``, issuing views as needed."""
        if joint_node in self._copies:
            return self._copies[joint_node]
        if joint_node in self._coming:
            return self._arrived(joint_node)
        if joint_node.op == "get_attr":
            self.bind(joint_node, self.graph.get_attr(str(joint_node.target)))
            return self._copies[joint_node]
        if joint_node.op == "placeholder" or self._is_base(joint_node):
            return self.missing(joint_node)
        return self._issue_view(joint_node)

    def run(self, index: int, kept: Collection[int], call: Callable[[fx.Node], fx.Node] | None = None) -> None:
        """Issue op ``index``; of its outputs, only those in ``kept`` that are not at hand already get a name."""
        node = self.joint.op_nodes[index]
        copy = call(node) if call is not None else self._copy(node)
        op = self.joint.program.ops[index]
        if isinstance(node.meta["val"], torch.Tensor):
            if op.outputs[0] in kept and not self.has(node):
                self._rebind_base(op.outputs[0], node, copy)
            copy.meta[CLAIM] = node
            copy.meta["val"] = node.meta["val"]
            return
        copy.meta[CLAIM] = node
        copy.meta["val"] = node.meta["val"]
        for buffer in op.outputs:
            base = self.joint.base_nodes[buffer]
            if buffer not in kept or base is None or self.has(base):
                continue
            element = self.graph.call_function(operator.getitem, (copy, base.args[1]))
            self._rebind_base(buffer, base, element)

    def free(self, buffer: int) -> None:
        """Forget the copy of ``buffer`` and all its views; the generated code drops them after their last use."""
        for view in self._views_of.pop(buffer, []):
            self._copies.pop(view, None)
        base = self.joint.base_nodes[buffer]
        if base is not None:
            self._copies.pop(base, None)

    def offload(self, buffer: int) -> None:
        """Issue the copy of ``buffer`` to its slot."""
        self._move(offload, self.slot_of[buffer], self.value(self._base(buffer)))

    def settle(self, buffer: int) -> None:
        """Wait until the copy of ``buffer`` has been written."""
        self._move(settle, self.slot_of[buffer], self.value(self._base(buffer)))

    def reload(self, buffer: int) -> None:
        """Issue the way back of ``buffer``; it arrives where it is read first."""
        base = self._base(buffer)
        self._coming[base] = self._move(reload, self.slot_of[buffer])

    def arrive_all(self) -> None:
        """Wait for all that is on its way back: this graph ends."""
        for base in list(self._coming):
            self._arrived(base)

    def _arrived(self, base: fx.Node) -> fx.Node:
        buffer = self.joint.buffer_of[base]
        assert buffer is not None
        copy = self._move(arrive, self.slot_of[buffer], self._coming.pop(base))
        self._rebind_base(buffer, base, copy)
        return copy

    def _move(self, target: Callable[..., Any], *args: Argument) -> fx.Node:
        return self.graph.call_function(target, args)

    def _base(self, buffer: int) -> fx.Node:
        base = self.joint.base_nodes[buffer]
        assert base is not None, "a buffer that nobody reads is not moved"
        return base

    def mapped(self, args: Any, kwargs: Any) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
        """Arguments of a joint node with every joint value replaced by its copy here."""
        return fx.map_arg(args, self.value), fx.map_arg(kwargs, self.value)

    def _copy(self, node: fx.Node) -> fx.Node:
        args, kwargs = self.mapped(node.args, node.kwargs)
        assert callable(node.target)
        return self.graph.call_function(node.target, args, kwargs)

    def _rebind_base(self, buffer: int, base: fx.Node, copy: fx.Node) -> None:
        self.bind(base, copy)
        copy.meta[MAKES] = buffer

    def _is_base(self, node: fx.Node) -> bool:
        buffer = self.joint.buffer_of.get(node)
        return buffer is not None and self.joint.base_nodes[buffer] is node

    def _issue_view(self, node: fx.Node) -> fx.Node:
        buffer = self.joint.buffer_of.get(node)
        folded = self._fold(node, buffer) if buffer is not None else self._twice_transposed(node)
        copy = folded if folded is not None else self._copy(node)
        if copy.meta.get(CLAIM) is None:
            self.bind(node, copy)
        else:
            self._copies[node] = copy  # the base itself, under another name
        if buffer is not None:
            self._views_of.setdefault(buffer, []).append(node)
        return copy

    def _twice_transposed(self, node: fx.Node) -> fx.Node | None:
        """What is at hand of the resident tensor that ``node`` is."""
        source = twice_transposed(node)
        return None if source is None else self.value(source)

    def _fold(self, node: fx.Node, buffer: int) -> fx.Node | None:
        """The chain from the buffer's base to ``node`` in at most one node, if it is sound and shorter."""
        base = self.joint.base_nodes[buffer]
        value = node.meta["val"]
        if base is None or base.op == "placeholder" or not isinstance(value, torch.Tensor):
            return None
        steps = 0
        at = node
        while at is not base:
            if at.target not in _STRIDED_VIEWS or not at.all_input_nodes:
                return None
            at = at.all_input_nodes[0]
            steps += 1
        whole = base.meta["val"]
        if whole.dtype != value.dtype or not is_whole(base):
            return None
        if (value.shape, value.stride(), value.storage_offset()) == (whole.shape, whole.stride(), 0):
            return self.value(base)
        if steps == 1:
            return None
        sizes, strides = list(value.shape), list(value.stride())
        arguments = (self.value(base), sizes, strides, value.storage_offset())
        return self.graph.call_function(_aten.as_strided.default, arguments)

"""Memory that nobody has written yet, in a captured step.

``empty`` and its kin give whatever lies in memory: two runs differ, and so does everything that copies it before the
real values come (circular padding makes its result that way). Zeros in its place change no value that the model
defines, and every buffer of the step becomes a function of the step's inputs.
"""

from __future__ import annotations

import torch
from torch import fx

from ebbtide.torch_seams.fake_tensors import mode_of

__all__ = ["fill_uninitialised"]

_aten = torch.ops.aten
_UNINITIALISED = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.empty_strided.default,
    _aten.new_empty_strided.default,
    _aten.empty_permuted.default,
)


def fill_uninitialised(graph: fx.Graph) -> None:
    """Make every op of ``graph`` that returns unwritten memory return zeros of the same strides.

    A tensor with holes between its elements is left as it is.
    """
    for target in _UNINITIALISED:
        for node in graph.find_nodes(op="call_function", target=target):
            value = node.meta["val"]
            order = sorted(range(value.dim()), key=lambda d: (-value.stride(d), d))
            with mode_of(value):
                dense = value.permute(order)
            if not dense.is_contiguous():
                continue
            options = {"dtype": value.dtype, "layout": value.layout, "device": value.device, "pin_memory": False}
            with graph.inserting_before(node):
                zeros = graph.call_function(_aten.full.default, (list(dense.shape), 0), options)
                zeros.meta = {**node.meta, "val": dense}
                back = zeros
                if order != sorted(order):
                    places = [order.index(d) for d in range(value.dim())]
                    back = graph.call_function(_aten.permute.default, (zeros, places))
                    back.meta = dict(node.meta)
            node.replace_all_uses_with(back)
            graph.erase_node(node)

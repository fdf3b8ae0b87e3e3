"""Results that a call is told not to make.

The backwards of norms and convolutions take an ``output_mask``. Where it says so, a kernel returns nothing in the place
of a result; torch's description of batch norm's backward has a tensor there all the same (torch 2.13: the input of a
batch norm that needs no gradient). The program counts what the kernel makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ebbtide.torch_seams.dispatcher import OpOverload, schema_of

__all__ = ["drop_masked_outputs"]

_MASK = "output_mask"


def drop_masked_outputs(graph: fx.Graph) -> None:
    """Take what no kernel makes out of the descriptions of ``graph``'s calls."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        value, mask = node.meta.get("val"), _mask_of(node, node.target)
        if isinstance(value, tuple | list) and mask is not None and len(mask) == len(value):
            made: list[Any] = [each if wanted else None for each, wanted in zip(value, mask, strict=True)]
            node.meta["val"] = tuple(made)


def _mask_of(node: fx.Node, target: OpOverload) -> Sequence[bool] | None:
    """The mask that ``node`` is called with; ``None`` if its op takes none."""
    names = [each.name for each in schema_of(target).arguments]
    if _MASK not in names:
        return None
    place = names.index(_MASK)
    return node.args[place] if place < len(node.args) else node.kwargs.get(_MASK)  # type: ignore[return-value]

"""The moment at which new values of parameters and inputs leave the forward, as an op of the program.

What a step changes in place is a new value that the runtime copies back when the forward has returned. A new value
that nobody reads is a mutation, which the boundary takes away (``program``, definition 6). One that later ops read as
well has to be there until then and may be needed longer: it is an ordinary buffer, read last of all forward ops by
:func:`copy_back`, which computes nothing and may not run again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ebbtide.torch_seams.fake_tensors import mode_of

__all__ = ["insert_copy_back"]


@torch.library.custom_op("ebbtide::copy_back", mutates_args=())
def copy_back(values: list[torch.Tensor]) -> torch.Tensor:
    """A tensor of no elements, once ``values`` are there."""
    return values[0].new_empty(0)


@copy_back.register_fake
def _(values: list[torch.Tensor]) -> torch.Tensor:
    return values[0].new_empty(0)


def insert_copy_back(graph: fx.Graph, values: Iterable[fx.Node], last: fx.Node) -> None:
    """Let the op read ``values`` right behind the latest of them and ``last``."""
    read = list(values)
    place = {node: index for index, node in enumerate(graph.nodes)}
    after = max([*read, last], key=place.__getitem__)
    with graph.inserting_after(after):
        node = graph.call_function(torch.ops.ebbtide.copy_back.default, (read,))
    first = read[0].meta["val"]
    with mode_of(first):
        node.meta["val"] = first.new_empty(0)

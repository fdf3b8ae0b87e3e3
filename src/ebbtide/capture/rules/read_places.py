"""Numbers that the forward reads from tensors to index by: refused with what needs no number.

A queue's pointer (``ptr = int(self.pointer); self.queue[:, ptr : ptr + n] = keys``) is one. Told from sizes: there the
number is one end of a slice, here an index, or both ends.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ebbtide.capture.known_breaks import READ_PLACE
from ebbtide.capture.origin import line_of
from ebbtide.errors import CaptureError
from ebbtide.torch_seams.graphs import is_read_number

__all__ = ["refuse_read_places"]

_INDEXES = (operator.getitem, operator.setitem)
_PLACED = {"select", "narrow", "roll", torch.select, torch.narrow, torch.roll}


def refuse_read_places(graph: fx.GraphModule) -> None:
    """Raise for Dynamo's ``graph`` if it indexes by a number that was read from a tensor.

    Raises:
        CaptureError: at the line that indexes.
    """
    for node in graph.graph.nodes:
        index = node.args[1:2] if node.target in _INDEXES else node.args[1:] if node.target in _PLACED else ()
        places = index[0] if index and isinstance(index[0], tuple | list) else index
        if any(map(_is_read, places)):
            where = line_of(node)
            reason, remedy = READ_PLACE
            raise CaptureError(f"{where.shown}. {reason}" if where.text else reason, remedy=remedy, source=where.source)


def _is_read(place: object) -> bool:
    if isinstance(place, slice):
        return _is_read(place.start) and _is_read(place.stop)
    return isinstance(place, fx.Node) and is_read_number(place)

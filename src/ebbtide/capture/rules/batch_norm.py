"""Batch norm in training mode: what a rerun calls, and which reads of its backward are none.

The captured op (``aten._native_batch_norm_legit_functional``) makes the normalised tensor, the batch's statistics
and the new running statistics in one call. Two facts about its kernels make it cheap to recompute:
1. ``aten._native_batch_norm_legit.no_stats`` runs the same kernel and gives the same bits for the first three
   outputs without reading or making running statistics; so a rerun may come after these were copied back. Where cuDNN
   computes (``cuda.batch_norm``), that is ``batch_norm_again``, with four outputs.
2. In training mode ``aten.native_batch_norm_backward`` uses the batch's statistics alone; the running statistics
   among its arguments are never read, so they need not be kept for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ebbtide.capture.cuda.batch_norm import AGAIN, TRAINED
from ebbtide.capture.rules.norm_dtypes import is_mixed
from ebbtide.torch_seams.dispatcher import OpOverload

__all__ = ["RUNNING_STATISTICS", "drop_ignored_reads", "repeat_of", "repeated_arguments"]

_aten = torch.ops.aten
_FORWARD = _aten._native_batch_norm_legit_functional.default
_REPEAT = _aten._native_batch_norm_legit.no_stats
_BACKWARD = _aten.native_batch_norm_backward.default
RUNNING_STATISTICS = 2
"""How many of the captured op's outputs, the last ones, a rerun does not make."""
# Positions in the schema of _BACKWARD.
_RUNNING_MEAN, _RUNNING_VAR, _TRAIN = 3, 4, 7


def drop_ignored_reads(graph: fx.Graph) -> None:
    """Fact 2: take the running statistics out of the arguments of every batch norm's backward in training mode."""
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        if node.args[_TRAIN] is True:
            node.update_arg(_RUNNING_MEAN, None)
            node.update_arg(_RUNNING_VAR, None)


def repeat_of(node: fx.Node) -> OpOverload | None:
    """What a rerun of ``node`` calls in place of its target by fact 1; ``None`` if nothing else.

    Only where the running statistics are inputs of the step, so that nobody but the boundary wants their new values.
    """
    if node.target is TRAINED:
        return None if node.args[3] is None else AGAIN
    if node.target is not _FORWARD or len(node.args) <= 5 or node.args[5] is not True:
        return None
    values = [each.meta["val"] if isinstance(each, fx.Node) else None for each in node.args[:5]]
    # The dtypes of the running statistics choose the kernel as well.
    return _REPEAT if is_mixed(values) == is_mixed(values[:3]) else None


def repeated_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The captured op's arguments as :func:`repeat_of` takes them: without the running statistics."""
    return (*node.args[:3], *node.args[5:]), node.kwargs

"""A few ops as one call that makes its results in slices: no value between them is ever whole.

The call is given a size and tensors, some of which are *cut* along one dimension. For each slice it runs its graph on
the slices of those, the others whole, and puts each result where it belongs in the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ebbtide.rewrites.sliced.calls import InSlices
from ebbtide.rewrites.spans import even_spans

__all__ = ["Tiled"]


class Tiled(InSlices):
    """The target of such a call: ``target(size, *tensors)`` returns a tuple.

    Args:
        graph: of one slice: an input for each tensor, and a tuple of outputs.
        inputs: for each input the dimension along which it is cut, ``None`` where it is whole.
        outputs: for each output the dimension along which slices of it are put together.
        text: its name, which says all that it does and is the same in every process and for every size.
    """

    def __init__(self, graph: fx.Graph, inputs: Sequence[int | None], outputs: Sequence[int], text: str) -> None:
        super().__init__(graph, "tiled", text)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)

    def __call__(self, size: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results, made in slices of about ``size`` (``rewrites.spans``)."""
        length = next(t.shape[cut] for t, cut in zip(tensors, self.inputs, strict=True) if cut is not None)
        whole: list[torch.Tensor] = []
        for a, b in even_spans(length, size):
            given = [t if cut is None else t.narrow(cut, a, b - a) for t, cut in zip(tensors, self.inputs, strict=True)]
            made = self.run(*given)
            if not whole:
                shapes = [
                    (*part.shape[:cut], length, *part.shape[cut + 1 :])
                    for part, cut in zip(made, self.outputs, strict=True)
                ]
                whole = [part.new_empty(shape) for part, shape in zip(made, shapes, strict=True)]
            for index, cut in enumerate(self.outputs):
                whole[index].narrow(cut, a, b - a).copy_(made[index])
            del given, made  # before the next ones are made
        return tuple(whole)

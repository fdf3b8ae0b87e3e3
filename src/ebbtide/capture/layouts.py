"""How the gradients of a step's outputs lie in memory, against how they were traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ebbtide.errors import CaptureError

__all__ = ["Layouts", "laid_out", "layouts_of"]

Layouts = tuple[tuple[int, ...] | None, ...]
"""Per gradient of an output its strides; ``None`` where it lies as it was traced."""


def layouts_of(values: Sequence[torch.Tensor], traced: Sequence[torch.Tensor]) -> Layouts:
    """The layouts of ``values``, which were ``traced`` as these."""
    return tuple(
        None if _lie_alike(each.shape, each.stride(), like.stride()) else each.stride()
        for each, like in zip(values, traced, strict=True)
    )


def _lie_alike(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether both strides lead to the same elements: that of a dimension of one element says nothing."""
    if strides == others or 0 in shape:
        return True
    return all(one == other for size, one, other in zip(shape, strides, others, strict=True) if size != 1)


def laid_out(
    shape: Sequence[int], strides: tuple[int, ...] | None, *, symbolic: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes a tensor that lies in memory as ``strides`` say of one that is traced.

    Args:
        shape: at which these are the strides.
        strides: ``None`` for a tensor that stays as it is.
        symbolic: whether the traced one has symbols for sizes: then the order of its dimensions says how it lies.

    Raises:
        CaptureError: if it does not.
    """
    if strides is None:
        return lambda tensor: tensor
    if not symbolic:
        return lambda tensor: tensor.new_empty_strided(tensor.shape, strides)
    expanded = {i for i, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1 and stride == 0}
    order = sorted(range(len(shape)), key=lambda i: (i in expanded or shape[i] == 1, -strides[i], i))
    dense = torch.empty([1 if i in expanded else shape[i] for i in order], device="meta")
    if not _lie_alike(dense.shape, dense.stride(), [strides[i] for i in order]):
        raise CaptureError("gradients arrive in the memory of larger ones, which no capture of many shapes holds")
    places = [order.index(i) for i in range(len(shape))]

    def like(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.new_empty([1 if i in expanded else tensor.shape[i] for i in order])
        return made.permute(places).expand(tensor.shape)

    return like

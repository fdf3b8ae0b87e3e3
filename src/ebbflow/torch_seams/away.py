"""Tensors whose memory is elsewhere for a while: every reference to them stays valid, and reading one brings it back.

1. A tensor is *away* while its storage is empty: its bytes are with whoever sent it away. It has another class then, of
   which torch asks before any function that is given such a tensor. What needs no memory (sizes, dtypes) is answered;
   before anything else the tensor is brought back, and is what it was.
2. A tensor can leave if nobody else has its storage: a view, an array of NumPy's or another process would read memory
   that is gone. Who holds the Python object itself, however often, does no harm.
3. The memory of what ``torch.load`` has read, and of what NumPy has seen, cannot be resized, and such a tensor cannot
   leave. Where nobody else uses the memory now, the tensor can be given memory of its own, and then leave.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ebbflow.torch_seams.trees import tree_leaves

__all__ = ["can_leave", "empty", "fill", "is_away", "own_memory"]

_BACK = "_ebbflow_back"


class _Away(torch.Tensor):
    """Definition 1."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Bring back what is read."""
        kwargs = kwargs or {}
        if func in _WITHOUT_MEMORY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for each in tree_leaves((args, kwargs)):
            if type(each) is _Away:
                getattr(each, _BACK)()
        return func(*args, **kwargs)


_WITHOUT_MEMORY: frozenset[Any] = frozenset(
    [
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad"),
                *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "itemsize", "nbytes", "_version"),
            )
        ),
        *(
            getattr(torch.Tensor, name)
            for name in (
                *("size", "dim", "numel", "stride", "element_size", "storage_offset", "is_contiguous"),
                *("is_floating_point", "is_complex", "nelement", "ndimension", "get_device", "__len__"),
            )
        ),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    ]
)


def is_away(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has no memory now."""
    return type(tensor) is _Away


def can_leave(tensor: torch.Tensor) -> bool:
    """Definition 2. ``tensor`` fills its storage, is a plain one and no part of a graph."""
    return _alone(tensor) and tensor.untyped_storage().resizable()


def own_memory(tensor: torch.Tensor) -> None:
    """Definition 3: copy ``tensor``, in place, if that is all that keeps it from leaving."""
    if _alone(tensor) and not tensor.untyped_storage().resizable() and not tensor.is_inference():
        copied = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        copied.copy_(tensor)
        tensor.set_(copied)  # pyright: ignore[reportArgumentType]


def _alone(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` fills its storage, which nobody else uses, is a plain one and no part of a graph."""
    if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.layout is not torch.strided:
        return False
    if tensor.device.type == "cpu" and tensor.is_shared():
        return False
    if tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    return _uses(tensor) == _USES


def _uses(tensor: torch.Tensor) -> tuple[int, int, int]:
    """How many have its storage in C++ and in Python, and how many itself in C++."""
    storage = tensor.untyped_storage()
    return (torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage), tensor._use_count())  # type: ignore[attr-defined]


_USES = _uses(torch.empty(1))  # where nobody else does


def empty(tensor: torch.Tensor, bring_back: Callable[[], object]) -> None:
    """Give back the memory of ``tensor``, which :func:`can_leave`. ``bring_back`` is called before it is read.

    It has to :func:`fill` the tensor, or to raise.
    """
    tensor.untyped_storage().resize_(0)
    setattr(tensor, _BACK, bring_back)
    tensor.__class__ = _Away  # type: ignore[assignment]


def fill(tensor: torch.Tensor, read: Callable[[torch.Tensor], object]) -> None:
    """Give ``tensor``, which is away, memory again. If ``read`` raises, it stays away.

    Args:
        tensor: that is away.
        read: fills the tensor that it is given, another one of the same memory, which any thread may touch.
    """
    with torch._C.DisableTorchFunctionSubclass():
        storage = tensor.untyped_storage()
        storage.resize_(tensor.numel() * tensor.element_size())
        try:
            same = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            same.set_(storage, 0, tensor.size(), tensor.stride())  # pyright: ignore[reportArgumentType]
            read(same)
        except BaseException:
            storage.resize_(0)
            raise
        tensor.__class__ = torch.Tensor
        delattr(tensor, _BACK)

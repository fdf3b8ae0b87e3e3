"""Tensors whose memory is elsewhere for a while: every reference to them stays valid, and reading one brings it back.

1. A tensor is *away* while its storage is empty: its bytes are with whoever sent it away. It has another class then, of
   which torch asks before any function that is given such a tensor. What needs no memory (sizes, dtypes) is answered;
   before anything else the tensor is brought back, and is what it was. It has that class from before its memory goes
   until after it is filled, so that a signal handler or another thread that comes in between asks too.
2. A tensor can leave if nobody else has its storage: a view, an array of NumPy's or another process would read memory
   that is gone. Who holds the Python object itself, however often, does no harm.
3. The memory of what ``torch.load`` has read, and of what NumPy has seen, cannot be resized, and such a tensor cannot
   leave. Where nobody else uses the memory now, the tensor can be given memory of its own, and then leave.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = ["can_offload", "fill", "forget", "is_offloaded", "mark", "own_memory"]

_MEMORY = "_ebbtide_memory"


@dataclass(frozen=True, slots=True)
class _Memory:
    """Of a tensor that is away: its storage, what it is, and who fills it."""

    storage: torch.UntypedStorage
    size: torch.Size
    stride: tuple[int, ...]
    bring_back: Callable[[torch.Tensor], object]


class _Away(torch.Tensor):
    """Definition 1."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Bring back what is read."""
        kwargs = kwargs or {}
        if func in _WITHOUT_MEMORY:
            return _unasked(func, *args, **kwargs)
        for each in _away_in((*args, *kwargs.values())):
            if (memory := vars(each).get(_MEMORY)) is not None:  # else another thread has brought it back
                memory.bring_back(each)
        return func(*args, **kwargs)


def _unasked(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``func`` as if no tensor were away: one call of C, so that no signal handler runs without being asked."""
    return torch._C._disabled_torch_function_impl(func, (), args, kwargs)


def _away_in(values: Iterable[Any]) -> Iterator[_Away]:
    """Those among ``values`` and in the containers among them. As the interpreter ends, torch's own walk fails."""
    for each in values:
        if type(each) is _Away:
            yield each
        elif isinstance(each, list | tuple | set | frozenset):
            yield from _away_in(each)
        elif isinstance(each, dict):
            yield from _away_in(each.values())


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


def is_offloaded(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has no memory now."""
    return type(tensor) is _Away


def can_offload(tensor: torch.Tensor) -> bool:
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


def mark(tensor: torch.Tensor, bring_back: Callable[[torch.Tensor], object]) -> Callable[[], object]:
    """``tensor``, which :func:`can_offload`, counts as away from now on; what is returned gives back its memory.

    ``bring_back`` of it is called before it is read. It has to :func:`fill` the tensor, or to raise.
    """
    storage = tensor.untyped_storage()
    setattr(tensor, _MEMORY, _Memory(storage, tensor.size(), tensor.stride(), bring_back))
    tensor.__class__ = _Away  # type: ignore[assignment]
    return functools.partial(storage.resize_, 0)


def fill(tensor: torch.Tensor, read: Callable[[torch.Tensor], object]) -> None:
    """Give ``tensor``, which is away, memory again. If ``read`` raises, it stays away.

    Args:
        tensor: that is away.
        read: fills the tensor that it is given, another one of the same memory, which any thread may touch, even after
            ``read`` has raised.
    """
    memory: _Memory | None = vars(tensor).get(_MEMORY)
    if memory is None:  # a signal handler has filled it
        return
    same = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    needed = math.prod(memory.size) * same.element_size()
    if memory.storage.nbytes() != needed:  # a thread that began before it was marked may be reading still
        memory.storage.resize_(needed)
    try:
        same.set_(memory.storage, 0, memory.size, memory.stride)  # pyright: ignore[reportArgumentType]
        if is_offloaded(tensor):  # likewise
            read(same)
    except BaseException:
        if is_offloaded(tensor):
            _let_go(tensor, memory)
        raise
    forget(tensor)


def forget(tensor: torch.Tensor) -> None:
    """``tensor`` has its memory: nothing is left of its having been away."""
    tensor.__class__ = torch.Tensor
    vars(tensor).pop(_MEMORY, None)


def _let_go(tensor: torch.Tensor, memory: _Memory) -> None:
    """Give ``tensor`` empty memory of its own; what it had goes when nobody writes to it any more."""
    other = torch.empty_strided(memory.size, memory.stride, dtype=tensor.dtype, device=tensor.device)
    storage = other.untyped_storage()
    storage.resize_(0)
    _unasked(_SET_DATA, tensor, other)
    setattr(tensor, _MEMORY, replace(memory, storage=storage))


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]

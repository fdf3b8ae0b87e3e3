"""Tensors whose memory is elsewhere for a while: every reference stays valid, and reading one is refused by name.

1. A tensor is *offloaded* while its storage is empty: its bytes are with whoever took them. It has another class then,
   of which torch asks before any function that is given such a tensor. What needs no memory (sizes, dtypes) is
   answered, all else raises. It has that class from before its memory goes until after it is filled again.
2. A tensor can be offloaded if nobody else has its storage: a view, an array of NumPy's or another process would read
   memory that is gone. Who holds the Python object itself, however often, does no harm.
3. The memory of what ``torch.load`` has read, and of what NumPy has seen, cannot be resized, and such a tensor cannot
   be offloaded. Where nobody else uses the memory now, the tensor can be given memory of its own first.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ebbtide.errors import UsageError

__all__ = ["Emptied", "can_offload", "fill", "is_offloaded", "own_memory", "refuse_reads", "restore"]

_REFUSAL = "_ebbtide_refusal"


class _Offloaded(torch.Tensor):
    """The class of a tensor whose memory is elsewhere (definition 1)."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse to read."""
        kwargs = kwargs or {}
        if func in _WITHOUT_MEMORY:
            return _unasked(func, *args, **kwargs)
        for each in _offloaded_in((*args, *kwargs.values())):
            if func is torch.Tensor.__repr__:
                return f"tensor(..., size={tuple(each.shape)}, offloaded)"
            if (refusal := vars(each).get(_REFUSAL)) is not None:  # else another thread has just brought it back
                name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
                raise UsageError(f"{name} is given {refusal}", argument="offload_optimizer", value=True)
        return func(*args, **kwargs)


def _unasked(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``func`` as if no tensor were offloaded."""
    return torch._C._disabled_torch_function_impl(func, (), args, kwargs)


def _offloaded_in(values: Iterable[Any]) -> Iterator[_Offloaded]:
    """Offloaded tensors among ``values`` and in the containers among them."""
    for each in values:
        if type(each) is _Offloaded:
            yield each
        elif isinstance(each, list | tuple | set | frozenset):
            yield from _offloaded_in(each)
        elif isinstance(each, dict):
            yield from _offloaded_in(each.values())


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
    return type(tensor) is _Offloaded


def can_offload(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` fills a storage that nobody else uses, is plain and part of no graph (definition 2)."""
    return _alone(tensor) and tensor.untyped_storage().resizable()


def own_memory(tensor: torch.Tensor) -> None:
    """Copy ``tensor``, in place, if that is all that keeps it from being offloaded (definition 3)."""
    if _alone(tensor) and not tensor.untyped_storage().resizable() and not tensor.is_inference():
        copied = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        copied.copy_(tensor)
        tensor.set_(copied)  # pyright: ignore[reportArgumentType]


def _alone(tensor: torch.Tensor) -> bool:
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


@dataclass(slots=True, eq=False)
class Emptied:
    """An offloaded tensor, not kept alive, and what it takes to fill it again."""

    tensor: weakref.ref[torch.Tensor]
    storage: torch.UntypedStorage
    size: torch.Size
    stride: tuple[int, ...]

    @property
    def is_offloaded(self) -> bool:
        """Whether it still lives and has no memory."""
        tensor = self.tensor()
        return tensor is not None and is_offloaded(tensor)


def refuse_reads(tensor: torch.Tensor, refusal: str) -> Emptied:
    """Have every read of ``tensor``, which :func:`can_offload`, refused from now on; its storage may be emptied then.

    Args:
        tensor: whose bytes have been copied.
        refusal: says what the tensor is and what to do; the text of the error behind "... is given".
    """
    emptied = Emptied(weakref.ref(tensor), tensor.untyped_storage(), tensor.size(), tensor.stride())
    setattr(tensor, _REFUSAL, refusal)
    tensor.__class__ = _Offloaded  # type: ignore[assignment]
    return emptied


def restore(tensor: torch.Tensor) -> None:
    """Let ``tensor``, which has its memory, be read again."""
    tensor.__class__ = torch.Tensor
    vars(tensor).pop(_REFUSAL, None)


def fill(emptied: Emptied, read: Callable[[torch.Tensor], object]) -> None:
    """Give an offloaded tensor memory again. If ``read`` raises, it stays offloaded.

    Args:
        emptied: whose tensor lives.
        read: fills the tensor that it is given, another one of the same memory, which any thread may touch, even after
            ``read`` has raised.
    """
    tensor = emptied.tensor()
    assert tensor is not None
    same = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    needed = math.prod(emptied.size) * same.element_size()
    if emptied.storage.nbytes() != needed:  # else a signal handler has come in the middle of the first read
        emptied.storage.resize_(needed)
    same.set_(emptied.storage, 0, emptied.size, emptied.stride)  # pyright: ignore[reportArgumentType]
    try:
        read(same)
    except BaseException:
        if is_offloaded(tensor):
            _let_go(tensor, emptied)
        raise
    restore(tensor)


def _let_go(tensor: torch.Tensor, emptied: Emptied) -> None:
    """Give ``tensor`` empty memory of its own; what it had goes when nobody writes to it any more."""
    other = torch.empty_strided(emptied.size, emptied.stride, dtype=tensor.dtype, device=tensor.device)
    emptied.storage = other.untyped_storage()
    emptied.storage.resize_(0)
    _unasked(_SET_DATA, tensor, other)


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]

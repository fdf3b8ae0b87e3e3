"""What a rewrite takes for granted of the kernels here, measured: slices of this product are rows of the whole one.

1. A *fact* is about one signature: sizes, strides, types and slices, on one device, build and thread count. It is
   measured once, on normal numbers, and kept on disk like a cost. Integers, zeros or tiny numbers would make sums exact
   whatever their order, and are never used.
2. A kernel may add in another order where its operands begin at another address: MKL's products of small matrices do. A
   slice of what a rewrite makes itself is a tensor of its own, which begins at a multiple of :data:`ALIGNMENT` as all
   that is allocated does, wherever that slice lies in the whole; it is measured as that (:func:`own`, :func:`either`).
3. Measuring needs the whole result once, within the profiling budget (``cost.profiling_budget``). Where that has no
   room for it, less is measured that does as well; else what is made up, and whole results of products, lie in files
   (``cost.mapped``), on a CPU. Where that is not possible either, nobody knows, and what rests on the fact is not used.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ebbtide.cost.cache import device_context, product_precisions
from ebbtide.cost.call import TensorSpec
from ebbtide.cost.mapped import mapped
from ebbtide.cost.profiling_budget import may_take
from ebbtide.files import EntryFile
from ebbtide.torch_seams.fake_tensors import without_modes

__all__ = [
    "ALIGNMENT",
    "Fact",
    "FactCache",
    "either",
    "known_facts",
    "made_up",
    "measured",
    "normal",
    "own",
    "place_of_whole",
    "same_bits",
]

ALIGNMENT = 512
"""Bytes: c10/core/alignment.h has 64 on a CPU, CUDACachingAllocator.cpp 512."""
_BESIDES = 1.1
"""Times what a fact says that it takes: vectors of a number for each row, and what kernels take besides."""
_KNOWN: dict[str, dict[str, bool]] = {}  # per file, what this process has read or measured


@dataclass(frozen=True)
class Fact:
    """Something that holds of the kernels here, or not (definition 1).

    Attributes:
        signature: all that it depends on besides the device.
        says: it in words.
        bytes: that measuring takes at its peak, but for what is small beside that.
        made_bytes: of them, what cannot lie in files; ``None`` if nothing can.
        holds: measures it.
        smaller: what is measured instead where there is no room for this one, on fewer rows of an op whose rows do
            not depend on each other; ``None`` if nothing would do.
    """

    signature: str
    says: str
    bytes: int
    holds: Callable[[], bool] = field(compare=False, repr=False)
    smaller: Fact | None = field(default=None, compare=False, repr=False)
    made_bytes: int | None = None


class FactCache(EntryFile[bool]):
    """Facts on disk."""

    name = "facts"
    schema = "ebbtide-facts/3"  # 2: ops whose last bits depend on the place were tried on few numbers

    def from_json(self, value: Any) -> bool:
        """Whether a fact holds; raises ``TypeError`` if ``value`` does not say so."""
        if not isinstance(value, bool):
            raise TypeError(f"{value!r} is neither true nor false")
        return value


def _cache(device: str) -> FactCache:
    return FactCache({**device_context(device), "products": " ".join(product_precisions())})


def known_facts(device: str) -> dict[str, bool]:
    """What is known on ``device``, ``"cpu"`` or ``"cuda"``, by signature."""
    cache = _cache(device)
    key = str(cache.path)
    if key not in _KNOWN:
        _KNOWN[key] = cache.load()
    return _KNOWN[key]


def measured(facts: Iterable[Fact], device: str) -> dict[str, bool | None]:
    """Whether each holds, by signature; ``None`` where there is no room to find out (definition 3).

    Random generators are left as they were.
    """
    return {fact.signature: _measured(fact, device) for fact in facts}


def _measured(fact: Fact, device: str) -> bool | None:
    known = known_facts(device)
    if fact.signature not in known:
        if may_take(fact.bytes * _BESIDES, matters=False):
            held: bool | None = _held(fact, device)
        elif fact.smaller is not None:
            return _measured(fact.smaller, device)
        else:
            held = _held_in_files(fact, device)
        if held is None:
            may_take(fact.bytes * _BESIDES)  # notes it
            return None
        known[fact.signature] = held
        _cache(device).add({fact.signature: held})
    return known[fact.signature]


def _held(fact: Fact, device: str) -> bool:
    with without_modes(), torch.no_grad(), torch.autocast(device, enabled=False):
        return fact.holds()


class _OfThread(threading.local):
    """Whether a fact is tried out with its numbers in files."""

    in_files = False


_here = _OfThread()


def _held_in_files(fact: Fact, device: str) -> bool | None:
    if device != "cpu" or fact.made_bytes is None or not may_take(fact.made_bytes * _BESIDES, matters=False):
        return None
    _here.in_files = True
    try:
        return _held(fact, device)
    except OSError:  # no room on the disk either
        return None
    finally:
        _here.in_files = False


def place_of_whole(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Where a whole result is to be written; ``None`` where it may be a tensor of its own (definition 3)."""
    return mapped(math.prod(shape), dtype).view(shape) if _here.in_files else None


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    place = place_of_whole(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device) if place is None else place


def own(part: Tensor) -> Tensor:
    """The numbers of ``part`` in memory of their own (definition 2), with its columns as near to each other or rows."""
    if part.dim() > 1 and part.mT.is_contiguous() and not part.is_contiguous():
        return part.mT.clone(memory_format=torch.contiguous_format).mT
    return part.clone(memory_format=torch.contiguous_format)


def either(part: Tensor) -> Iterator[Tensor]:
    """``part`` as it lies in the whole, and in memory of its own where that may make a difference."""
    yield part
    if part.data_ptr() % ALIGNMENT:
        yield own(part)


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Normal numbers of a generator of their own."""
    drawing = torch.Generator(device).manual_seed(seed)
    return _empty(shape, dtype, device).normal_(generator=drawing)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type have the same bits; what is no number is equal to itself then."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))


def made_up(spec: TensorSpec, seed: int) -> Tensor:
    """What ``spec`` describes, of normal numbers; half of what is true or false is true, and integers are zero."""
    if spec.dtype.is_floating_point:
        vector = normal((spec.extent,), spec.dtype, spec.device, seed)
    elif spec.dtype is torch.bool:
        vector = _empty((spec.extent,), torch.bool, spec.device)
        torch.gt(normal((spec.extent,), torch.float32, spec.device, seed), 0, out=vector)
    else:
        vector = torch.zeros(spec.extent, dtype=spec.dtype, device=spec.device)
    return vector.as_strided(spec.shape, spec.stride)

"""The facts that calls in slices rest on: each op gives a slice the bits that it gives it among the whole.

An elementwise kernel of the CPU computes most numbers in vectors and the *rest* one by one, by another function for
some ops: of ``sigmoid``, ``silu``, ``gelu`` by ``tanh`` and ``pow`` one number in six to sixty has another last bit
there, of ``gelu`` one in some thousands. So few numbers are in a rest that made-up ones may agree by chance. Whether an
op is of that kind is asked on numbers enough, and if it is, its fact holds only where the slices have the rest that the
whole has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ebbtide.cost.call import TensorSpec
from ebbtide.rewrites.facts import Fact, made_up, own, place_of_whole
from ebbtide.rewrites.sliced.axes import Axis, Cut, Piece, is_product
from ebbtide.rewrites.sliced.calls import InSlices, SlicedCall, moved_arguments
from ebbtide.torch_seams.dispatcher import OpOverload, is_pointwise

__all__ = ["slice_facts"]

_FEW_SLICES = 4
"""On which ops that make each number of those of its row are tried where there is no room for all."""
_FEW_ROWS = 64
"""Rows on which they are tried where slices are of columns."""
_ALONE, _REST = 4096, 7
"""Numbers on which it is asked whether a rest has other bits, and how many of them are computed at a time."""
_VECTORS = 64
"""Elements of the widest vectors, two at a time (``aten/src/ATen/native/cpu/Loops.h``), of 16-bit types with AVX512."""
_GRAIN = 32768
"""Elements from which a kernel uses another thread (``at::internal::GRAIN_SIZE``), whose own part has a rest too."""


def slice_facts(call: SlicedCall, size: int) -> Iterator[Fact]:
    """Those of ``call`` in slices of about ``size``, each once."""
    known: set[str] = set()
    for part in call.target.ops:
        fact = _OpFact(call.target, part, size).fact()
        if fact.signature not in known:
            known.add(fact.signature)
            yield fact


class _OpFact:
    """A fact about one op.

    Args:
        call: that runs it in slices.
        part: it, in the reference graph.
        size: of slices.
    """

    def __init__(self, call: InSlices, part: fx.Node, size: int) -> None:
        self.part, self.axis, self.size, self.rank = part, call.axis, size, call.axis.rank
        self.cut: Cut = call.cuts[part]
        self.positions = [position for position, each in enumerate(part.args) if isinstance(each, fx.Node)]
        self.tensors = [each for each in part.args if isinstance(each, fx.Node)]
        self.own = [each.op == "call_function" for each in self.tensors]
        self.cuts: list[Cut] = [call.cuts[each] for each in self.tensors]

    def fact(self) -> Fact:
        """About all of it; about a part besides, where each number is made of those of its row alone."""
        whole = self._fact(self.axis, self.axis.leading)
        if is_product(self.part):
            return whole
        *outer, last = self.axis.leading
        few = (*(1 for _ in outer), min(last, _FEW_SLICES * self.size)) if self.axis.dim == 0 else (_FEW_ROWS,)
        fewer = replace(self.axis, leading=few) if self.axis.dim == 0 else self.axis
        smaller = self._fact(fewer, few)
        return whole if smaller.bytes >= whole.bytes else replace(whole, smaller=smaller)

    def _fact(self, axis: Axis, leading: tuple[int, ...]) -> Fact:
        part, size = self.part, self.size
        specs = [self._spec(each, leading) for each in self.tensors]
        name = str(part.target).removeprefix("aten.").removesuffix(".default")
        constants = [each for each in (*part.args, *part.kwargs.values()) if not isinstance(each, fx.Node)]
        operands = " ".join(
            f"{spec}/{cut}{'*' * is_own}" for spec, cut, is_own in zip(specs, self.cuts, self.own, strict=True)
        )
        share = axis.share(size)
        copied = share * sum(_bytes(each) for each, is_own in zip(specs, self.own, strict=True) if is_own)
        out = part.meta["val"]
        result = math.prod(self._shape(tuple(out.shape), leading)) * out.element_size()
        widened = 2 * sum(_bytes(each) for each in specs if each.dtype.itemsize < 4) if self._widens() else 0
        made = copied + widened + share * result
        return Fact(
            f"{name} by {axis.name} {list(axis.leading)} of {operands} {constants} by {size}",
            f"{size} {axis.name} at a time of {self._what(name)}",
            math.ceil(sum(map(_bytes, specs)) + made + result),
            lambda: self._holds(axis, specs),
            made_bytes=math.ceil(made + (0 if is_product(part) else result)),
        )

    def _widens(self) -> bool:
        """Whether it is a product of two dimensions, whose kernels may sum narrow numbers in float32."""
        return self.rank == 2 and is_product(self.part)

    def _what(self, name: str) -> str:
        if len(self.tensors) < 2 or not is_product(self.part):
            return name
        first, second = (each.meta["val"].shape for each in self.tensors[-2:])
        return f"the {' x '.join(map(str, (*first, second[-1])))} product"

    def _spec(self, node: fx.Node, leading: tuple[int, ...]) -> TensorSpec:
        value = node.meta["val"]
        shape = self._shape(tuple(value.shape), leading)
        as_it_is = shape == tuple(value.shape) or not value.is_contiguous()
        dense = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        stride = tuple(value.stride()) if as_it_is else dense
        return TensorSpec(shape, stride, value.dtype, value.device.type)

    def _shape(self, shape: tuple[int, ...], leading: tuple[int, ...]) -> tuple[int, ...]:
        """``shape`` with as much of the first dimensions as ``leading`` has; that of the whole as it is."""
        kept = self.rank - 1
        if leading == self.axis.leading or len(shape) <= kept:
            return shape
        own, last = shape[:-kept], shape[-kept:]
        if len(own) != len(leading):
            if math.prod(own) == self._rows():
                return (math.prod(leading), *last)
            leading = leading[len(leading) - len(own) :]
        return (*(min(a, b) for a, b in zip(own, leading, strict=True)), *last)

    def _rows(self) -> int:
        """Length of the first dimension of large values."""
        return math.prod(self.part.meta["val"].shape[: 1 - self.rank])

    def _holds(self, axis: Axis, specs: Sequence[TensorSpec]) -> bool:
        by_place = self._depends_on_place()
        tensors = [made_up(spec, seed) for seed, spec in enumerate(specs)]
        whole = self._flat(self._whole(tensors))
        if by_place and not _alike_in_vectors(
            whole, [axis.part(whole, self.cut, each) for each in axis.pieces(self.size)]
        ):
            return False
        for piece in axis.pieces(self.size):
            given = [self._slice(axis, each, index, piece) for index, each in enumerate(tensors)]
            if not torch.equal(self._call(given, inner=True), axis.part(whole, self.cut, piece)):
                return False
            del given  # before the next ones are made
        return True

    def _depends_on_place(self) -> bool:
        """Whether it is elementwise and gives a number other bits in a rest than in a vector."""
        if not isinstance(self.part.target, OpOverload) or not is_pointwise(self.part.target):
            return False
        kinds = [(each.meta["val"].dtype, each.meta["val"].device.type) for each in self.tensors]
        tensors = [made_up(TensorSpec((_ALONE,), (1,), *kind), seed) for seed, kind in enumerate(kinds)]
        whole = self._call(tensors, inner=False)
        rests = [slice(begin, begin + _REST) for begin in range(0, _ALONE, _REST)]
        alone = [self._call([each[rest].clone() for each in tensors], inner=False) for rest in rests]
        return not torch.equal(torch.cat(alone), whole)

    def _flat(self, tensor: Tensor) -> Tensor:
        """With as many dimensions as the rank, where it has more."""
        return tensor if tensor.dim() <= self.rank else tensor.reshape(-1, *tensor.shape[1 - self.rank :])

    def _slice(self, axis: Axis, tensor: Tensor, index: int, piece: Piece) -> Tensor:
        """Laid out as a call has it: what it has made itself is a tensor of its own, or swapped."""
        if not self.own[index]:
            return axis.part(tensor, self.cuts[index], piece)
        part = axis.part(self._flat(tensor), self.cuts[index], piece)
        return own(part) if tensor.is_contiguous() else own(part.mT).mT

    def _whole(self, tensors: Sequence[Tensor]) -> Tensor:
        value = self.part.meta["val"]
        place = place_of_whole(tuple(value.shape), value.dtype) if is_product(self.part) else None
        if place is None:
            return self._call(tensors, inner=False)
        return self.part.target.overloadpacket(*self._arguments(tensors), out=place, **self.part.kwargs)  # type: ignore[union-attr]

    def _call(self, tensors: Sequence[Tensor], *, inner: bool) -> Tensor:
        args = self._arguments(tensors)
        given = moved_arguments(self.part, args) if inner else args
        return self.part.target(*given, **self.part.kwargs)  # type: ignore[operator]

    def _arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        args: list[Any] = list(self.part.args)
        for position, each in zip(self.positions, tensors, strict=True):
            args[position] = each
        return args


def _alike_in_vectors(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether each number is in a vector in its part exactly if it is in the whole; no, where that is not certain."""
    if not all(each.is_contiguous() for each in (whole, *parts)):  # columns: a rest in each row
        return all(each.shape[-1] % _VECTORS == 0 for each in (whole, *parts))
    return all(each.numel() % _VECTORS == 0 for each in parts[:-1]) and all(map(_is_shared_in_vectors, (whole, *parts)))


def _is_shared_in_vectors(tensor: Tensor) -> bool:
    """Whether no thread but the last has a rest of ``tensor``."""
    threads = max(1, min(torch.get_num_threads(), math.ceil(tensor.numel() / _GRAIN)))
    return threads == 1 or math.ceil(tensor.numel() / threads) % _VECTORS == 0


def _bytes(spec: TensorSpec) -> int:
    return spec.extent * spec.dtype.itemsize

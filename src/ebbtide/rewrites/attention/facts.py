"""The facts that attention in slices rests on: each op gives a few entries the bits that it gives them among all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ebbtide.cost.call import TensorSpec
from ebbtide.rewrites.attention.calls import FLAT, SPREAD, ByEntry, blocks, kind_of, part_of_entries
from ebbtide.rewrites.attention.regions import BATCHED, SOFTMAXES
from ebbtide.rewrites.facts import Fact, made_up, own
from ebbtide.rewrites.sliced.calls import Tile
from ebbtide.rewrites.views import seen

__all__ = ["entry_facts"]

_FEW_SLICES = 4
"""Of entries, on which ops that make each number of those of its row are tried where there is no room for all."""


def entry_facts(tile: Tile, size: int) -> Iterator[Fact]:
    """Those of ``tile`` in slices of at most ``size`` entries, each once."""
    target = tile.target
    assert isinstance(target, ByEntry)
    seen_already: set[str] = set()
    for part in tile.parts:
        fact = _Of(part, frozenset(tile.parts), target.leading, size).fact()
        if fact.signature not in seen_already:
            seen_already.add(fact.signature)
            yield fact


class _Of:
    """A fact about one op.

    Args:
        part: it.
        inner: the ops whose results it has in slices only.
        leading: the dimensions of entries.
        size: of slices.
    """

    def __init__(self, part: fx.Node, inner: frozenset[fx.Node], leading: Sequence[int], size: int) -> None:
        self.part, self.leading, self.size = part, tuple(leading), size
        self.tensors = list(part.all_input_nodes)
        self.own = [seen(each)[0] in inner for each in self.tensors]
        self.kinds = [
            (FLAT if part.meta["val"].dim() == 3 else SPREAD) if is_own else kind_of(part, each)
            for each, is_own in zip(self.tensors, self.own, strict=True)
        ]

    def fact(self) -> Fact:
        """About all entries; about a few besides, where each number is made of those of its row alone."""
        whole = self._fact(self.leading)
        few = (*(1 for _ in self.leading[1:]), min(self.leading[-1], _FEW_SLICES * self.size))
        if self.part.target in BATCHED or math.prod(few) == math.prod(self.leading):
            return whole
        return replace(whole, smaller=self._fact(few))

    def _fact(self, leading: tuple[int, ...]) -> Fact:
        part, size = self.part, self.size
        specs = [self._spec(each, leading) for each in self.tensors]
        name = str(part.target).removeprefix("aten.").removesuffix(".default")
        out = part.meta["val"]
        result = math.prod(leading) * math.prod(out.shape[-2:]) * out.element_size()
        constants = [each for each in (*part.args, *part.kwargs.values()) if not isinstance(each, fx.Node)]
        operands = " ".join(
            f"{spec}/{kind}{'*' * is_own}" for spec, kind, is_own in zip(specs, self.kinds, self.own, strict=True)
        )
        copied = sum(_bytes(each) for each, is_own in zip(specs, self.own, strict=True) if is_own)
        return Fact(
            f"{name} by entries {list(leading)} of {operands} {constants} by {size}",
            f"{size} of {math.prod(leading)} entries at a time of {name}",
            sum(map(_bytes, specs)) + copied + 2 * result,
            lambda: self._holds(leading, specs),
        )

    def _spec(self, node: fx.Node, leading: tuple[int, ...]) -> TensorSpec:
        """Of ``node``, or of as much of it as there is of ``leading``."""
        value = node.meta["val"]
        shape = tuple(value.shape)
        if leading != self.leading and len(shape) > 2 and shape[0] * len(shape) > 0:
            shape = _cut(shape, self.leading, leading)
            stride = tuple(value.new_empty(shape).stride()) if value.is_contiguous() else tuple(value.stride())
            return TensorSpec(shape, stride, value.dtype, value.device.type)
        return TensorSpec(shape, tuple(value.stride()), value.dtype, value.device.type)

    def _holds(self, leading: tuple[int, ...], specs: Sequence[TensorSpec]) -> bool:
        tensors = [made_up(spec, seed) for seed, spec in enumerate(specs)]
        whole = self._call(tensors, inner=False)
        flat = whole.reshape(-1, *whole.shape[-2:])
        for block in blocks(leading, self.size):
            given = [
                self._given(each, kind, is_own, leading, block)
                for each, kind, is_own in zip(tensors, self.kinds, self.own, strict=True)
            ]
            if not torch.equal(self._call(given, inner=True), part_of_entries(flat, FLAT, leading, block)):
                return False
            del given  # before the next ones are made
        return True

    def _given(self, tensor: Tensor, kind: str, is_own: bool, leading: tuple[int, ...], block: Any) -> Tensor:
        """Laid out as a call has it: what it has made itself is a tensor of its own, or swapped."""
        part = part_of_entries(tensor, kind, leading, block)
        if not is_own:
            return part
        return own(part) if tensor.is_contiguous() else own(part.mT).mT

    def _call(self, tensors: Sequence[Tensor], *, inner: bool) -> Tensor:
        known = dict(zip(self.tensors, tensors, strict=True))
        args, kwargs = fx.map_arg((self.part.args, self.part.kwargs), known.__getitem__)
        if inner and (position := SOFTMAXES.get(self.part.target)) is not None:
            args = (*args[:position], -1, *args[position + 1 :])
        return self.part.target(*args, **kwargs)  # type: ignore[operator]


def _bytes(spec: TensorSpec) -> int:
    return spec.extent * spec.dtype.itemsize


def _cut(shape: tuple[int, ...], leading: tuple[int, ...], few: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` with as many entries as ``few`` has."""
    *own, rows, columns = shape
    if len(own) == 1 and len(leading) > 1 and own[0] == math.prod(leading):
        return (math.prod(few), rows, columns)
    fewer = few[len(few) - len(own) :]
    return (*(min(a, b) for a, b in zip(own, fewer, strict=True)), rows, columns)

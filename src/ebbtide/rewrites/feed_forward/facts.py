"""The facts that a tile rests on: slices of each product, sum and chain of elementwise ops are slices of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ebbtide.cost.call import TensorSpec
from ebbtide.rewrites.facts import Fact, made_up, normal, own
from ebbtide.rewrites.feed_forward.regions import PRODUCTS, is_flip, is_sum_of_rows, seen_through
from ebbtide.rewrites.feed_forward.tiles import ROWS
from ebbtide.rewrites.sliced.calls import Tile
from ebbtide.rewrites.sliced.elementwise import is_elementwise
from ebbtide.rewrites.sliced.growth import bytes_of
from ebbtide.rewrites.spans import even_spans
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["tile_facts"]

_FEW_SLICES = 4
"""Of rows, on which elementwise ops are tried where there is no room for all."""


def tile_facts(tile: Tile, size: int) -> Iterator[Fact]:
    """Those of ``tile`` in slices of about ``size``, each once."""
    seen: set[str] = set()
    for part in tile.parts:
        if part.target in PRODUCTS or is_sum_of_rows(part):
            fact = _sum_fact(tile, part, size)
            if fact.signature not in seen:
                seen.add(fact.signature)
                yield fact
    chain = [part for part in tile.parts if is_elementwise(part)]
    if chain:
        yield _chain_fact(tile, chain, size)


# -- products and sums ----------------------------------------------------------------------------------------------


def _sum_fact(tile: Tile, part: fx.Node, size: int) -> Fact:
    operands = [each for each in arguments_of(part) if isinstance(each, fx.Node)]
    specs = [_spec(each) for each in operands]
    cuts, out_cut = _cuts(tile, part)
    made = [_source(each) in tile.parts and cut is not None for each, cut in zip(operands, cuts, strict=True)]
    kind = str(part.target).removeprefix("aten.").partition(".")[0]
    out = part.meta["val"]
    what = "the sum over rows" if is_sum_of_rows(part) else f"the {' x '.join(map(str, _sizes(specs)))} product"
    says = f"{size} {'rows' if tile.axis == ROWS else 'columns'} at a time of {what}"
    words = [
        f"{spec}/{'whole' if cut is None else cut}{'*' * is_own}"
        for spec, cut, is_own in zip(specs, cuts, made, strict=True)
    ]
    length = out.shape[out_cut]
    share = max(b - a for a, b in even_spans(length, size)) / length
    copied = share * sum(_bytes(spec) for spec, is_own in zip(specs, made, strict=True) if is_own)
    widened = 2 * sum(_bytes(spec) for spec in specs if spec.dtype.itemsize < 4)  # by kernels that sum in float32
    needs = math.ceil(sum(map(_bytes, specs)) + copied + widened + (1 + share) * bytes_of(part))

    def holds() -> bool:
        tensors = [made_up(spec, seed) for seed, spec in enumerate(specs)]

        def call(*given: Tensor) -> Tensor:
            values = iter(given)
            args = [next(values) if isinstance(each, fx.Node) else each for each in arguments_of(part)]
            return part.target(*args)  # type: ignore[operator]

        whole = call(*tensors)
        for a, b in even_spans(length, size):
            given = [
                t if cut is None else _slice(t, cut, a, b, is_own)
                for t, cut, is_own in zip(tensors, cuts, made, strict=True)
            ]
            if not torch.equal(call(*given), whole.narrow(out_cut, a, b - a)):
                return False
            del given  # before the next ones are made
        return True

    return Fact(f"{kind} by {tile.axis} {' '.join(words)} by {size}", says, needs, holds)


def _sizes(specs: list[TensorSpec]) -> tuple[int, ...]:
    first, second = specs[-2:]
    return (*first.shape, second.shape[-1])


def _source(node: fx.Node) -> fx.Node:
    return seen_through(arguments_of(node)[0]) if is_flip(node) else seen_through(node)


def _slice(tensor: Tensor, cut: int, a: int, b: int, is_own: bool) -> Tensor:
    """Laid out as a tile has it: what it has made itself is a tensor of its own, or the transposed view of one."""
    part = tensor.narrow(cut, a, b - a)
    if not is_own:
        return part
    return own(part) if tensor.is_contiguous() else own(part.t()).t()


def _cuts(tile: Tile, part: fx.Node) -> tuple[list[int | None], int]:
    """Along which dimension each operand of ``part`` is cut, and its result."""
    given: dict[fx.Node, int | None] = {}
    operands = [each for each in arguments_of(part) if isinstance(each, fx.Node)]
    if is_sum_of_rows(part):
        return [1], 1
    wide = [_source(each) in tile.parts for each in operands]
    if tile.axis == ROWS:
        place = len(operands) - 2
        return [0 if position == place else None for position in range(len(operands))], 0
    if not any(wide):
        *bias, _, _ = operands
        return [*(each.meta["val"].dim() - 1 for each in bias), None, 1], 1
    for each, is_wide in zip(operands, wide, strict=True):
        given[each] = (0 if is_flip(each) else 1) if is_wide else None
    return [given[each] for each in operands], 0 if wide[0] else 1


# -- elementwise ops ------------------------------------------------------------------------------------------------


def _chain_fact(tile: Tile, chain: list[fx.Node], size: int) -> Fact:
    value = chain[0].meta["val"]
    columns = value.shape[-1]
    rows = value.numel() // columns
    few = min(rows, _FEW_SLICES * size) if tile.axis == ROWS else min(rows, 64)
    fact = _chain(tile, chain, size, rows, columns)
    return replace(fact, smaller=_chain(tile, chain, size, few, columns)) if few < rows else fact


def _chain(tile: Tile, chain: list[fx.Node], size: int, rows: int, columns: int) -> Fact:
    says = f"{size} {'rows' if tile.axis == ROWS else 'columns'} at a time of {len(chain)} elementwise ops"
    read = dict.fromkeys(each for part in chain for each in map(seen_through, part.all_input_nodes))
    given = {each: seed for seed, each in enumerate(each for each in read if each not in chain)}
    dtypes = ", ".join(str(each.meta["val"].dtype).removeprefix("torch.") for each in given)
    axis = 0 if tile.axis == ROWS else 1
    device = chain[0].meta["val"].device.type
    spans = even_spans((rows, columns)[axis], size)
    share = max(b - a for a, b in spans) / (rows, columns)[axis]
    large = [each for each in (*given, *chain) if each.meta["val"].dim()]
    needs = math.ceil(sum(rows * columns * each.meta["val"].element_size() for each in large) * (1 + share))

    def holds() -> bool:
        values = {
            each: normal((rows, columns) if each.meta["val"].dim() else (), each.meta["val"].dtype, device, seed)
            for each, seed in given.items()
        }
        whole = _run(chain, values)
        for a, b in spans:
            part = {each: own(t.narrow(axis, a, b - a)) if t.dim() else t for each, t in values.items()}
            made = _run(chain, part)
            if not all(torch.equal(made[each], whole[each].narrow(axis, a, b - a)) for each in chain):
                return False
            del part, made  # before the next ones are made
        return True

    signature = f"elementwise by {tile.axis} [{rows}, {columns}] of {dtypes} by {size}: {tile.target}"
    return Fact(signature, says, needs, holds)


def _run(chain: list[fx.Node], values: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
    known: dict[fx.Node, Any] = dict(values)
    for part in chain:
        args, kwargs = fx.map_arg((part.args, part.kwargs), lambda each: known[seen_through(each)])
        known[part] = part.target(*args, **kwargs)  # type: ignore[operator]
    return {each: known[each] for each in chain}


def _bytes(spec: TensorSpec) -> int:
    return spec.extent * spec.dtype.itemsize


# -- made-up operands -----------------------------------------------------------------------------------------------


def _spec(node: fx.Node) -> TensorSpec:
    value = node.meta["val"]
    return TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype, value.device.type)

"""Feed-forward layers as a rule: their hidden values are made in slices, forward and backward, and never whole.

Of a region (``feed_forward.regions``) come at most three calls (``feed_forward.tiles``): the forward's results by rows,
the backward's by rows, and the gradients of weights by columns. Each makes the hidden values again that it needs, so
the opening products run once more per call of the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ebbtide.capture.joint import Captured
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.rewrites.facts import Fact
from ebbtide.rewrites.feed_forward.facts import tile_facts
from ebbtide.rewrites.feed_forward.proof import prove_tiled
from ebbtide.rewrites.feed_forward.regions import Region, find_regions, seen_through
from ebbtide.rewrites.feed_forward.tiles import ROWS, tiles_of
from ebbtide.rewrites.once import once
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.rule import Estimate, Left
from ebbtide.rewrites.sliced.calls import Tile
from ebbtide.rewrites.sliced.costs import workspace_of
from ebbtide.rewrites.sliced.elementwise import is_elementwise
from ebbtide.rewrites.sliced.growth import bytes_of
from ebbtide.rewrites.sliced.places import has_places, name_of, with_tiles
from ebbtide.rewrites.spans import STEP, even_spans
from ebbtide.step.program import Program
from ebbtide.step.rewrite import Rewrite

__all__ = ["TileRule", "left_regions"]

RULE = "feed-forward"
_PARTS = (4, 16)
"""Of the hidden values, what slices take at a time."""
_MATTERS = 0.5
"""Of the step's floor less its gradients: hidden values that take less at once do not pin it."""
_LEAST = 0.05
"""Of the floor: less is not worth what is made twice."""


class TileRule:
    """See ``rewrites.rule``."""

    name = RULE
    free = False

    def ways(self, step: Captured) -> Iterator[tuple[Rewrite, ...]]:
        """Slices of the same share for all regions."""
        regions = _worthwhile(step)
        seen: set[tuple[Rewrite, ...]] = set()
        for part in _PARTS if regions else ():
            way = tuple(_rewrite(each, part) for each in regions)
            if way not in seen:
                seen.add(way)
                yield way

    def facts(self, step: Captured, rewrite: Rewrite) -> Sequence[Fact]:
        """Of the products, sums and elementwise ops of its tiles."""
        region = _region_at(step, rewrite)
        return _facts(region, dict(rewrite.settings))

    def instead(self, step: Captured, rewrite: Rewrite) -> Iterator[Rewrite]:
        """Nothing."""
        return iter(())

    def rewritten(self, step: Captured, rewrites: Sequence[Rewrite]) -> Captured:
        """All regions that ``rewrites`` name."""
        return with_tiles(step, _tiles(step, rewrites))

    def estimates(
        self, step: Captured, rewrites: Sequence[Rewrite], program: Program, after: Captured
    ) -> Mapping[str, Estimate]:
        """What the ops of a tile take, and reading again for each slice what is read whole."""
        seconds = {op.name: op.seconds for op in program.ops}
        return {name_of(tile): _estimate(tile, size, seconds) for tile, size in _tiles(step, rewrites)}

    def prove(self, step: Captured, after: Captured) -> Sequence[Replaced]:
        """By ``rewrites.feed_forward.proof``."""
        return prove_tiled(step, after)


# -- which regions --------------------------------------------------------------------------------------------------


def _worthwhile(step: Captured) -> list[Region]:
    """Those that may pin the step's floor, or what is found just above it."""
    regions = find_regions(step)[0]
    least = _least_bytes(step) if regions else 0.0
    return [each for each in regions if each.bytes_at_once >= least and has_places(step, tiles_of(each))]


def _least_bytes(step: Captured) -> float:
    program = step.program
    floor = floor_bytes(program)[0]
    gradients = sum(program.buffers[each].bytes for each in set(program.gradients))
    return max(_MATTERS * (floor - gradients), _LEAST * floor)


def left_regions(step: Captured) -> list[Left]:
    """What looks like a region that matters and is left as it is."""
    _, left = find_regions(step)
    return left


@once
def _by_name(step: Captured) -> dict[str, Region]:
    return {each.at: each for each in find_regions(step)[0] if has_places(step, tiles_of(each))}


def _at(regions: Mapping[str, Region], rewrite: Rewrite) -> Region:
    if (region := regions.get(rewrite.at)) is None:
        raise LookupError(f"it has no feed-forward layer at {rewrite.at}")
    return region


def _tiles(step: Captured, rewrites: Sequence[Rewrite]) -> list[tuple[Tile, int]]:
    """Those of ``rewrites``, with the sizes of their slices."""
    regions = _by_name(step)
    return [(tile, _size(tile, dict(each.settings))) for each in rewrites for tile in tiles_of(_at(regions, each))]


def _region_at(step: Captured, rewrite: Rewrite) -> Region:
    return _at(_by_name(step), rewrite)


def _rewrite(region: Region, part: int) -> Rewrite:
    settings = {"rows": max(STEP, region.rows // part), "columns": 0, "places": 1}
    if region.weights:
        settings["columns"] = max(STEP, region.columns // part)
    facts = tuple(dict.fromkeys(each.says for each in _facts(region, settings)))
    form = "rows and columns" if region.weights else "rows"
    return Rewrite(RULE, region.at, region.where, form, tuple(settings.items()), facts)


def _size(tile: Tile, settings: Mapping[str, int]) -> int:
    return settings["rows" if tile.axis == ROWS else "columns"]


def _facts(region: Region, settings: Mapping[str, int]) -> list[Fact]:
    return [fact for tile in tiles_of(region) for fact in tile_facts(tile, _size(tile, settings))]


# -- what they take -------------------------------------------------------------------------------------------------


def _estimate(tile: Tile, size: int, seconds: Mapping[str, float]) -> Estimate:
    cut = next(each for each, along in zip(tile.given, tile.cuts, strict=True) if along is not None)
    along = next(each for each in tile.cuts if each is not None)
    length = cut.meta["val"].shape[along]
    slices = even_spans(length, size)
    share = max(b - a for a, b in slices) / length
    per_byte = len(slices) * _seconds_per_byte(tile, seconds)
    whole = {each for each, along in zip(tile.given, tile.cuts, strict=True) if along is None}
    takes = 0.0
    for part in tile.parts:  # a slice takes its share, or what reading takes that every slice reads whole
        read = sum(bytes_of(each) for each in whole.intersection(part.all_input_nodes))
        takes += max(seconds.get(part.name, 0.0), read * per_byte)
    return Estimate(takes, workspace_of(tile, share))


def _seconds_per_byte(tile: Tile, seconds: Mapping[str, float]) -> float:
    """How fast memory is read, by the elementwise ops; 0 where there are none."""
    chain = [each for each in tile.parts if is_elementwise(each)]
    moved = sum(bytes_of(each) + sum(map(bytes_of, map(seen_through, each.all_input_nodes))) for each in chain)
    return sum(seconds.get(each.name, 0.0) for each in chain) / moved if moved else 0.0

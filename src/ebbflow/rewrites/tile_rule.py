"""Feed-forward layers as a rule: their hidden values are made in slices, forward and backward, and never whole.

Of a region (``rewrites.wide``) come at most three calls (``rewrites.tiles``): the forward's results by rows, the
backward's by rows, and the gradients of weights by columns. Each makes the hidden values again that it needs, so the
opening products run once more per call of the backward.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from ebbflow.capture.joint import Captured, reread
from ebbflow.planners.bounds.floor import floor_bytes
from ebbflow.rewrites.facts import Fact
from ebbflow.rewrites.heads import Left
from ebbflow.rewrites.replaced import Replaced
from ebbflow.rewrites.rule import Estimate
from ebbflow.rewrites.spans import STEP, even_spans
from ebbflow.rewrites.tile_facts import tile_facts
from ebbflow.rewrites.tile_proof import PARTS, prove_tiled
from ebbflow.rewrites.tiles import ROWS, Tile, tiles_of
from ebbflow.rewrites.wide import Region, find_regions, is_elementwise, is_flip, seen_through
from ebbflow.step.program import Program
from ebbflow.step.rewrite import Rewrite
from ebbflow.torch_seams.graphs import arguments_of
from ebbflow.torch_seams.trees import tree_leaves

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

    def rewritten(self, step: Captured, rewrites: Sequence[Rewrite]) -> Captured:
        """All regions that ``rewrites`` name."""
        graph = fx.Graph(owning_module=step.graph.owning_module)
        nodes: dict[fx.Node, fx.Node] = {}
        results = graph.graph_copy(step.graph, nodes)
        graph.output(tuple(tree_leaves(results))).meta = dict(step.graph.output_node().meta)
        regions = _by_name(step)
        writer = _Writer(step, nodes)
        for each in rewrites:
            for tile in tiles_of(_at(regions, each)):
                writer.write(tile, _size(tile, dict(each.settings)))
        writer.erase()
        graph.lint()
        return reread(step, graph)

    def estimates(
        self, step: Captured, rewrites: Sequence[Rewrite], program: Program, after: Captured
    ) -> Mapping[str, Estimate]:
        """What the ops of a tile take, and reading again for each slice what is read whole."""
        seconds = {op.name: op.seconds for op in program.ops}
        regions = _by_name(step)
        found: dict[str, Estimate] = {}
        for each in rewrites:
            for tile in tiles_of(_at(regions, each)):
                found[_name(tile)] = _estimate(tile, _size(tile, dict(each.settings)), seconds)
        return found

    def prove(self, step: Captured, after: Captured) -> Sequence[Replaced]:
        """By ``rewrites.tile_proof``."""
        return prove_tiled(step, after)


# -- which regions --------------------------------------------------------------------------------------------------


def _worthwhile(step: Captured) -> list[Region]:
    """Those that may pin the step's floor, or what is found just above it."""
    regions = find_regions(step)[0]
    least = _least_bytes(step) if regions else 0.0
    return [each for each in regions if each.bytes_at_once >= least and _has_places(step, each)]


def _least_bytes(step: Captured) -> float:
    program = step.program
    floor = floor_bytes(program)[0]
    gradients = sum(program.buffers[each].bytes for each in set(program.gradients))
    return max(_MATTERS * (floor - gradients), _LEAST * floor)


def left_regions(step: Captured) -> list[Left]:
    """What looks like a region that matters and is left as it is."""
    _, left = find_regions(step)
    return left


def _by_name(step: Captured) -> dict[str, Region]:
    return {each.at: each for each in find_regions(step)[0] if _has_places(step, each)}


def _at(regions: Mapping[str, Region], rewrite: Rewrite) -> Region:
    if (region := regions.get(rewrite.at)) is None:
        raise LookupError(f"it has no feed-forward layer at {rewrite.at}")
    return region


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


# -- where they go --------------------------------------------------------------------------------------------------


def _has_places(step: Captured, region: Region) -> bool:
    order = {node: index for index, node in enumerate(step.graph.nodes)}
    ops = frozenset(step.op_nodes)
    return all(_place_of(tile, order, ops) is not None for tile in tiles_of(region))


def _place_of(tile: Tile, order: Mapping[fx.Node, int], ops: frozenset[fx.Node]) -> fx.Node | None:
    """Before this node of the captured graph goes the tile's call; ``None`` where some reader comes too early."""
    latest = max((order[each] for given in tile.given for each in _makers(given, ops)), default=-1)
    first = min(tile.results, key=order.__getitem__)
    if latest < order[first]:
        return first
    if any(order[user] < latest for each in tile.results for user in each.users):
        return None
    return next(node for node, index in order.items() if index > latest)


def _makers(node: fx.Node, ops: frozenset[fx.Node]) -> Iterator[fx.Node]:
    """The ops and inputs of the step that ``node`` is a view of, and those that this view depends on."""
    if node in ops or not node.all_input_nodes:
        yield node
    else:
        for each in node.all_input_nodes:
            yield from _makers(each, ops)


def _name(tile: Tile) -> str:
    return f"{tile.results[0].name}_tiled"


class _Writer:
    """Puts tiles into a copy of the joint graph.

    Args:
        step: whose graph it is.
        nodes: from the step's nodes to the copy's.
    """

    def __init__(self, step: Captured, nodes: dict[fx.Node, fx.Node]) -> None:
        self.nodes = nodes
        self.order = {node: index for index, node in enumerate(step.graph.nodes)}
        self.ops = frozenset(step.op_nodes)
        self.replaced: set[fx.Node] = set()

    def write(self, tile: Tile, size: int) -> None:
        """One tile in the place of its parts."""
        place = _place_of(tile, self.order, self.ops)
        assert place is not None
        for each in tile.given:
            self._hoist(each, place)
        graph = self.nodes[place].graph
        args = (size, *(self.nodes[each] for each in tile.given))
        with graph.inserting_before(self.nodes[place]):
            node = graph.create_node("call_function", tile.target, args, name=_name(tile))
        node.meta = dict(tile.results[0].meta)
        node.meta["val"] = tuple(each.meta["val"] for each in tile.results)
        node.meta[PARTS] = tuple(each.name for each in tile.parts)
        for index, result in reversed([*enumerate(tile.results)]):
            with graph.inserting_after(node):
                made = graph.call_function(operator.getitem, (node, index))
            made.meta = dict(result.meta)
            self.nodes[result].replace_all_uses_with(made)
        self.replaced.update(tile.parts)

    def _hoist(self, node: fx.Node, place: fx.Node) -> None:
        """Views that come after ``place`` and are read by its tile go before it."""
        if self.order[node] < self.order[place]:
            return
        assert node not in self.ops
        for each in node.all_input_nodes:
            self._hoist(each, place)
        self.nodes[place].prepend(self.nodes[node])

    def erase(self) -> None:
        """What nobody reads any more, views included."""
        for node in reversed(self.order):
            mine = self.nodes.get(node)
            view = node.op == "call_function" and (is_flip(node) or seen_through(node) is not node)
            if mine is not None and not mine.users and (view or node in self.replaced):
                mine.graph.erase_node(mine)


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
        read = sum(_bytes(each) for each in whole.intersection(part.all_input_nodes))
        takes += max(seconds.get(part.name, 0.0), read * per_byte)
    return Estimate(takes, _workspace(tile, share))


def _seconds_per_byte(tile: Tile, seconds: Mapping[str, float]) -> float:
    """How fast memory is read, by the elementwise ops; 0 where there are none."""
    chain = [each for each in tile.parts if is_elementwise(each)]
    moved = sum(_bytes(each) + sum(map(_bytes, map(seen_through, each.all_input_nodes))) for each in chain)
    return sum(seconds.get(each.name, 0.0) for each in chain) / moved if moved else 0.0


def _workspace(tile: Tile, share: float) -> int:
    """Of the longest slice: all that is there at once between its ops, each dropped after its last reader."""
    last: dict[fx.Node, int] = {}
    for index, part in enumerate(tile.parts):
        for each in part.all_input_nodes:
            last[seen_through(arguments_of(each)[0]) if is_flip(each) else seen_through(each)] = index
    live: dict[fx.Node, int] = {}
    most = 0
    for index, part in enumerate(tile.parts):
        live[part] = round(_bytes(part) * share) + 64
        most = max(most, sum(live.values()))
        for each in [each for each in live if last.get(each, -1) <= index and each not in tile.results]:
            del live[each]
    return most


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size()

"""Attention by products and a softmax as a rule: its scores are made of a few entries at a time, and never whole.

Of a region (``attention.regions``) come at most two calls (``attention.calls``): the forward's product of
probabilities and values, and the backward's three. The second makes scores and probabilities again, so that nothing
square is kept from one to the other; that is one product more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ebbtide.capture.joint import Captured
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.rewrites.attention.calls import calls_of
from ebbtide.rewrites.attention.facts import entry_facts
from ebbtide.rewrites.attention.proof import prove_attention
from ebbtide.rewrites.attention.regions import Attention, find_attention
from ebbtide.rewrites.facts import Fact
from ebbtide.rewrites.once import once
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.rule import Estimate, Left
from ebbtide.rewrites.sliced.calls import Tile
from ebbtide.rewrites.sliced.costs import workspace_of
from ebbtide.rewrites.sliced.places import has_places, name_of, with_tiles
from ebbtide.step.program import Program
from ebbtide.step.rewrite import Rewrite

__all__ = ["AttentionRule", "left_attention"]

RULE = "attention"
_PARTS = (4, 16)
"""Of all entries, what slices take at a time, at most those of one sequence; and one entry alone."""
_MATTERS = 0.25
"""Of the step's floor less its gradients: scores that take less at once neither pin it nor stand just below."""
_LEAST = 0.05
"""Of the floor: less is not worth what is made twice."""


class AttentionRule:
    """See ``rewrites.rule``."""

    name = RULE
    free = False

    def ways(self, step: Captured) -> Iterator[tuple[Rewrite, ...]]:
        """Slices of the same share for all regions."""
        regions = _worthwhile(step)
        seen: set[tuple[Rewrite, ...]] = set()
        for part in (*_PARTS, None) if regions else ():
            way = tuple(_rewrite(each, part) for each in regions)
            if way not in seen:
                seen.add(way)
                yield way

    def facts(self, step: Captured, rewrite: Rewrite) -> Sequence[Fact]:
        """Of each op of its calls."""
        return _facts(_at(_by_name(step), rewrite), rewrite["entries"])

    def instead(self, step: Captured, rewrite: Rewrite) -> Iterator[Rewrite]:
        """Nothing."""
        return iter(())

    def rewritten(self, step: Captured, rewrites: Sequence[Rewrite]) -> Captured:
        """All regions that ``rewrites`` name."""
        return with_tiles(step, _calls(step, rewrites))

    def estimates(
        self, step: Captured, rewrites: Sequence[Rewrite], program: Program, after: Captured
    ) -> Mapping[str, Estimate]:
        """What the ops of a call take."""
        seconds = {op.name: op.seconds for op in program.ops}
        found: dict[str, Estimate] = {}
        for rewrite, regions in ((each, _by_name(step)) for each in rewrites):
            region = _at(regions, rewrite)
            share = min(rewrite["entries"], region.leading[-1]) / region.entries
            for tile in calls_of(region):
                takes = sum(seconds.get(each.name, 0.0) for each in tile.parts)
                found[name_of(tile)] = Estimate(takes, workspace_of(tile, share))
        return found

    def prove(self, step: Captured, after: Captured) -> Sequence[Replaced]:
        """By ``rewrites.attention.proof``."""
        return prove_attention(step, after)


def left_attention(step: Captured) -> list[Left]:
    """What looks like an attention by products and a softmax, and is left as it is."""
    return find_attention(step)[1]


def _worthwhile(step: Captured) -> list[Attention]:
    """Those that may pin the step's floor, or what is found just above it."""
    regions = find_attention(step)[0]
    if not regions:
        return []
    program = step.program
    floor = floor_bytes(program)[0]
    gradients = sum(program.buffers[each].bytes for each in set(program.gradients))
    least = max(_MATTERS * (floor - gradients), _LEAST * floor)
    return [each for each in regions if each.bytes_at_once >= least and has_places(step, calls_of(each))]


@once
def _by_name(step: Captured) -> dict[str, Attention]:
    return {each.at: each for each in find_attention(step)[0] if has_places(step, calls_of(each))}


def _at(regions: Mapping[str, Attention], rewrite: Rewrite) -> Attention:
    if (region := regions.get(rewrite.at)) is None:
        raise LookupError(f"it has no attention by products and a softmax at {rewrite.at}")
    return region


def _rewrite(region: Attention, part: int | None) -> Rewrite:
    entries = 1 if part is None else max(1, min(region.entries // part, region.leading[-1]))
    facts = tuple(dict.fromkeys(each.says for each in _facts(region, entries)))
    return Rewrite(RULE, region.at, region.where, "slices", (("entries", entries), ("places", 1)), facts)


def _calls(step: Captured, rewrites: Sequence[Rewrite]) -> list[tuple[Tile, int]]:
    regions = _by_name(step)
    return [(tile, each["entries"]) for each in rewrites for tile in calls_of(_at(regions, each))]


def _facts(region: Attention, entries: int) -> list[Fact]:
    found = [fact for tile in calls_of(region) for fact in entry_facts(tile, entries)]
    return list({each.signature: each for each in found}.values())

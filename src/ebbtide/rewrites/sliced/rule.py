"""The rule that makes large values of a few ops in slices, and never whole: one for each kind of region.

Of a region (``sliced.regions``) come a few calls (``sliced.calls``). Each makes the large values again that it needs,
so that none is kept from one to the other: the opening products run once more for each call of the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.rewrites.facts import Fact
from ebbtide.rewrites.once import once
from ebbtide.rewrites.reference import PART
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.rewrite_proof import RewriteProof, prove_references
from ebbtide.rewrites.rule import Estimate, Rule, Skipped
from ebbtide.rewrites.sliced.attention import Attention
from ebbtide.rewrites.sliced.axes import is_elementwise, is_product
from ebbtide.rewrites.sliced.calls import InSlices, SlicedCall, calls_of, workspace_of
from ebbtide.rewrites.sliced.cuts import cuts_of
from ebbtide.rewrites.sliced.facts import slice_facts
from ebbtide.rewrites.sliced.feed_forward import FeedForward
from ebbtide.rewrites.sliced.places import has_places, with_calls
from ebbtide.rewrites.sliced.regions import Growth, Region, bytes_of, find_regions
from ebbtide.rewrites.views import made_by
from ebbtide.step.program import Program
from ebbtide.step.rewrite import Rewrite

__all__ = ["ATTENTION", "FEED_FORWARD", "SlicedRule"]

_LEAST = 0.05
"""Share of the step's floor: less is not worth what is made twice."""


@dataclass(frozen=True)
class SlicedRule(Rule):
    """Regions of one kind in slices.

    Attributes:
        name: as in ``Rewrite.rule``.
        kind: of region.
        what: it is, for people.
        parts: of all large values, what slices take at a time: one over each of these.
        matters: of the step's floor less its gradients: large values that take less at once do not pin it.
    """

    name: str
    kind: type[Growth]
    what: str
    parts: tuple[float, ...]
    matters: float

    def candidates(self, step: Captured) -> Iterator[tuple[Rewrite, ...]]:
        """Slices of the same share for all regions."""
        regions = self._worthwhile(step)
        candidates = [tuple(self._rewrite(each, part) for each in regions) for part in self.parts if regions]
        yield from dict.fromkeys(candidates)

    def facts(self, step: Captured, rewrite: Rewrite) -> Sequence[Fact]:
        """What each op of its calls rests on."""
        return _facts(self._region(step, rewrite), dict(rewrite.settings))

    def shape(self, step: Captured, rewrite: Rewrite) -> object:
        """All but the sizes of slices."""
        return replace(
            rewrite, settings=tuple(each for each in rewrite.settings if each[0] not in self.kind.axes), facts=()
        )

    def rewritten(self, step: Captured, rewrites: Sequence[Rewrite]) -> Captured:
        """All regions that ``rewrites`` name."""
        return with_calls(step, self._calls(step, rewrites))

    def estimates(
        self, step: Captured, rewrites: Sequence[Rewrite], program: Program, after: Captured
    ) -> Mapping[str, Estimate]:
        """What the ops of a call take, and reading again for each slice what is read whole."""
        seconds = {op.name: op.seconds for op in program.ops}
        return {call.name: _estimate(call, size, seconds) for call, size in self._calls(step, rewrites)}

    def prove(self, step: Captured, after: Captured) -> Sequence[Replaced]:
        """By the reference graphs of its calls, and where these are cut."""
        return prove_references(step, after, InSlices, _check)

    def skipped(self, step: Captured) -> Sequence[Skipped]:
        """What looks like a region and is left as it is."""
        return find_regions(step, self.kind)[1]

    def _worthwhile(self, step: Captured) -> list[Region]:
        """Those that may pin the step's floor, or what is found just above it."""
        regions = find_regions(step, self.kind)[0]
        if not regions:
            return []
        floor = floor_bytes(step.program)[0]
        gradients = sum(step.program.buffers[each].bytes for each in set(step.program.gradients))
        least = max(self.matters * (floor - gradients), _LEAST * floor)
        return [each for each in regions if each.bytes_at_once >= least and has_places(step, calls_of(each))]

    def _region(self, step: Captured, rewrite: Rewrite) -> Region:
        if (region := _region_at(step, self.kind, rewrite.at)) is None:
            raise LookupError(f"it has no {self.what} at {rewrite.at}")
        return region

    def _calls(self, step: Captured, rewrites: Sequence[Rewrite]) -> list[tuple[SlicedCall, int]]:
        """Those of ``rewrites``, with the sizes of their slices."""
        found = ((each, call) for each in rewrites for call in calls_of(self._region(step, each)))
        return [(call, each[call.axis.name]) for each, call in found]

    def _rewrite(self, region: Region, part: float) -> Rewrite:
        axes = region.axes
        settings = {name: axes[name].size_of(part) if name in axes else 0 for name in self.kind.axes} | {"places": 1}
        facts = tuple(dict.fromkeys(each.says for each in _facts(region, settings)))
        form = "slices" if len(self.kind.axes) == 1 else " and ".join(axes)
        return Rewrite(self.name, region.at, region.where, form, tuple(settings.items()), facts)


@once
def _region_at(step: Captured, kind: type[Growth], at: str) -> Region | None:
    found = next((each for each in find_regions(step, kind)[0] if each.at == at), None)
    return found if found is not None and has_places(step, calls_of(found)) else None


def _check(proof: RewriteProof, node: fx.Node, _: Mapping[fx.Node, Any]) -> None:
    """Require that a call may run on its slices and puts its results together again; raises ``RewriteError``."""
    target, size = node.target, node.args[0]
    assert isinstance(target, InSlices)
    proof.require(type(size) is int and size > 0, f"{node.name} has slices of {size}")
    cuts = cuts_of(target.reference, target.axis, target.inputs)
    made: Any = target.reference.output_node().args[0]
    proof.require(tuple(cuts[each] for each in made) == target.outputs, f"{node.name} is put together otherwise")


def _facts(region: Region, settings: Mapping[str, int]) -> list[Fact]:
    found = [fact for call in calls_of(region) for fact in slice_facts(call, settings[call.axis.name])]
    return list({each.signature: each for each in found}.values())


def _estimate(call: SlicedCall, size: int, seconds: Mapping[str, float]) -> Estimate:
    per_byte = len(list(call.axis.pieces(size))) * _seconds_per_byte(call, seconds)
    takes = 0.0
    for op in call.target.ops:  # a slice takes its share, or what reading takes that every slice reads whole
        whole = [each for each in op.all_input_nodes if call.target.cuts[each] is None]
        read = sum(map(bytes_of, whole)) if is_product(op) else 0
        takes += max(seconds.get(op.meta[PART], 0.0), read * per_byte)
    return Estimate(takes, workspace_of(call, size))


def _seconds_per_byte(call: SlicedCall, seconds: Mapping[str, float]) -> float:
    """How fast memory is read, by the elementwise ops; 0 where there are none."""
    chain = [each for each in call.target.ops if is_elementwise(each)]
    moved = sum(bytes_of(each) + sum(map(bytes_of, map(made_by, each.all_input_nodes))) for each in chain)
    return sum(seconds.get(each.meta[PART], 0.0) for each in chain) / moved if moved else 0.0


FEED_FORWARD = SlicedRule("feed-forward", FeedForward, "feed-forward layer", (4, 16), 0.5)
ATTENTION = SlicedRule("attention", Attention, "attention by products and a softmax", (4, 16, float("inf")), 0.25)

"""What it comes to where some buffers leave for a while, to be swapped in or to be computed again.

Definitions (*stages* and *loads* are those of ``hybrid.choice``):
1. A *gap* is the time for which a buffer is away: after the stage in which it is read last before, until the one in
   which it is read next. A gap ends by *swap*, a load in its stage or before, or by *recompute*, right before the read.
2. Computing again needs inputs. One that is away is loaded if it was swapped out, where its gap then ends, and made
   again in turn if it was not: a *chain*. What a chain makes stays only if it was away itself and is read later.
3. What may not run again is held until the chain has read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ebbtide.planners.hybrid.choice import Choice
from ebbtide.planners.search.reruns_from_kept import last_rerun_stage
from ebbtide.step.program import Program, analysis

__all__ = ["Gap", "chain_of", "choice_of_gaps"]


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch in which a buffer is not read (definition 1).

    Attributes:
        leaves: the stage in which the buffer is read last before.
        back: the stage in which it is read next.
        load: the stage in which it is loaded at the latest; ``None`` for recompute.
    """

    leaves: int
    back: int
    load: int | None = None


def choice_of_gaps(program: Program, gaps: Mapping[int, Gap], tiers: Mapping[int, str]) -> Choice:
    """The loads and reruns of gaps.

    Args:
        program: any.
        gaps: by buffer.
        tiers: per buffer that is swapped, its tier.
    """
    walk = _Walk(program, gaps)
    for stage in range(len(program.ops)):
        walk.step(stage)
    moved = {b for b, _ in walk.loads}
    reruns, loads = frozenset(walk.reruns), frozenset(walk.loads)
    return Choice(reruns, loads, tiers={b: tier for b, tier in tiers.items() if b in moved})


def chain_of(program: Program, gaps: Mapping[int, Gap], b: int, stage: int) -> tuple[int, ...]:
    """The ops that run again where ``b`` is needed in ``stage`` and away, with all that they need."""
    walk = _Walk(program, gaps, {c for c, gap in gaps.items() if gap.back < stage})
    return tuple(sorted(walk.missing([b], stage)[1]))


class _Walk:
    """Which buffers are there, stage by stage."""

    def __init__(self, program: Program, gaps: Mapping[int, Gap], returned: Iterable[int] = ()) -> None:
        self.program, self.gaps = program, gaps
        self.reruns: set[tuple[int, int]] = set()
        self.loads: set[tuple[int, int]] = set()
        self._returned = set(returned)
        self._last = _last_reads(program)
        self._loaded_at: dict[int, list[int]] = {}
        for b, gap in gaps.items():
            if gap.load is not None:
                self._loaded_at.setdefault(gap.load, []).append(b)

    def step(self, stage: int) -> None:
        """What a stage loads and runs again."""
        for b in self._loaded_at.get(stage, ()):
            if b not in self._returned:
                self.loads.add((b, stage))
                self._returned.add(b)
        loads, ops = self.missing(self.program.ops[stage].inputs, stage)
        self.loads.update((b, stage) for b in loads)
        self.reruns.update((op, stage) for op in ops)
        made = (b for op in ops for b in self.program.made_by_rerun(op))
        self._returned.update(b for b in (*loads, *made) if self._was_away(b, stage) and self._last[b] >= stage)

    def missing(self, buffers: Iterable[int], stage: int) -> tuple[set[int], set[int]]:
        """What has to be loaded and what has to run again for ``buffers`` in ``stage`` (definitions 2 and 3)."""
        loads: set[int] = set()
        ops: set[int] = set()
        stack = list(buffers)
        while stack:
            b = stack.pop()
            producer = self.program.buffers[b].producer
            if producer is None or producer in ops or b in loads or self._is_there(b, stage):
                continue
            if b in self.gaps and self.gaps[b].load is not None:
                loads.add(b)
            elif stage <= last_rerun_stage(self.program, producer) and b in self.program.made_by_rerun(producer):
                ops.add(producer)
                stack.extend(self.program.ops[producer].inputs)
        return loads, ops

    def _was_away(self, b: int, stage: int) -> bool:
        return b in self.gaps and self.gaps[b].leaves < stage

    def _is_there(self, b: int, stage: int) -> bool:
        if b in self.program.pinned or (stage < self.program.boundary and b in self.program.mutations):
            return True
        return stage <= self._last[b] and (b in self._returned or not self._was_away(b, stage))


@analysis
def _last_reads(program: Program) -> list[int]:
    """Per buffer, the last op that reads it, or -1."""
    return [max(readers, default=-1) for readers in program.readers]

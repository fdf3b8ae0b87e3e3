"""Libra: recompute first, swap where a chain of recomputation makes a new peak (Wang, master's thesis, NTHU 2024).

Definitions (*feature maps* are those of ``published.moving``, gaps and chains those of ``published.evicting``):
1. *Candidates* are feature maps that are made before the op at which the unplanned step peaks, in captured order. The
   published prototype picks them by parts of generated names; this structural rule stands for it.
2. *All swapped*: candidates leave, in that order, until the unplanned peak less their sizes meets the budget; while the
   peak does not, the next ones do. Where this plan peaks is the *reference*.
3. *Recompute first*: all that leave are recomputed but outputs of blocks, which other blocks read, and what the runs at
   the reference's peak read or make. The blocks are those of ``published.per_block``, each with what follows it.
4. *Refinement*: while the plan is over the budget, what the runs at its peak read or make is swapped. Where nothing is
   left there, the first that is still recomputed is. At last all are swapped.
5. *Swaps* block computing both ways, as in the prototype. With ``overlap`` they run beside it: a copy is issued when
   its buffer is made, and the way back begins as late as its lane lets it be in time by static estimates, or later
   where the budget has no room. Trials are judged without overlap, which fits where overlap does: copies and ways back
   take no room but what the budget has (``published.measured``, definitions 1 and 3).
6. *Steps* may be switched off, to see what each gives. Without ``all_swapped`` what leaves is chosen by sizes alone,
   there is no reference, and where the refinement has swapped everything the next candidates leave. Without
   ``recompute_first`` all that leave are swapped. Without ``new_peaks`` the refinement always swaps the first that is
   still recomputed. Without ``refinement`` there is none: a plan of definition 3 that does not fit is given up for the
   reference.

The prototype measures each trial by a real iteration and ends the refinement once the peak is where the reference has
it; here the simulator judges each trial, so that a step is planned that does not fit, and what is within the budget is
good enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.planners.base import Answer, Problem, Progress, Status
from ebbtide.planners.hybrid.choice import Choice
from ebbtide.planners.hybrid.floor import tiers_of
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner
from ebbtide.planners.settings import setting
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide_published.planners.evicting import Gap, choice_of_gaps
from ebbtide_published.planners.measured import Measured, measured, peak_stage
from ebbtide_published.planners.moving import (
    NO_TIER,
    Tiers,
    answer_of,
    backward_reads,
    feature_maps,
    last_forward_read,
    prefetched,
    unmoved,
)
from ebbtide_published.planners.per_block import blocks_of, read_outside

__all__ = ["LibraSettings", "libra"]


@dataclass(frozen=True, kw_only=True)
class LibraSettings:
    """What may follow the name."""

    overlap: bool = setting(False)
    """Whether swaps run beside computing (definition 5)."""
    all_swapped: bool = setting(True)
    """Whether what leaves is found by swapping it, which gives the reference (definitions 2 and 6)."""
    recompute_first: bool = setting(True)
    """Whether what leaves is recomputed at first (definitions 3 and 6)."""
    new_peaks: bool = setting(True)
    """Whether what is at a new peak is swapped before anything else (definitions 4 and 6)."""
    refinement: bool = setting(True)
    """Whether a plan that is over the budget is refined (definitions 4 and 6)."""


@planner("libra", moves=True, needs_tiers=True, settings=LibraSettings)
def libra(problem: Problem) -> Answer:
    """Recompute first, swap at new peaks."""
    if (unplanned := keep_all(problem)).status is Status.OPTIMAL:
        return unplanned
    if not problem.links:
        return unmoved(problem, NO_TIER)
    return _Libra(problem).answer()


def _joined(blocks: list[int]) -> list[int]:
    """Blocks with the ops after each that are in none."""
    found: list[int] = []
    for block in blocks:
        found.append(block if block >= 0 or not found else found[-1])
    return found


class _Libra:
    def __init__(self, problem: Problem) -> None:
        self.settings: LibraSettings = problem.settings or LibraSettings()
        self.problem, self.program = problem, problem.program
        self.candidates = self._candidates()
        self.waiting = list(self.candidates)
        self.gone: list[int] = []
        self.swapped: set[int] = set()
        self.found: Measured | None = None

    def answer(self) -> Answer:
        """All swapped, then recompute first, then refined."""
        if not self.candidates:
            return unmoved(self.problem, "no feature map is made before the peak")
        if self.settings.all_swapped:
            self._all_swapped()
            if not self._fits() or self.found is None:
                return answer_of(self.problem, self.found, {"chosen": "no plan: all candidates swapped do not fit"})
        else:
            self._leave(self._excess(unplanned_bytes(self.program)))
        all_swapped = set(self.gone)
        if self.settings.recompute_first:
            self._recompute_first()
        else:
            self.swapped = all_swapped
            self.try_()
        while not self._fits() and self.settings.refinement and not self.problem.interrupt and self._refine():
            pass
        if not self._fits() and self.settings.all_swapped:
            self.swapped = all_swapped
            self.try_()
        found = self._overlapped()
        count = 0 if found is None else len({b for b, _ in found.choice.loads})
        text = f"{len(self.gone)} of {len(self.candidates)} candidates leave, {count} of them swapped"
        return answer_of(self.problem, found, {"chosen": text})

    def _candidates(self) -> list[int]:
        """Buffers that may be evicted (definition 1)."""
        program = self.program
        whole = measured(self.problem, choice_of_gaps(program, {}, {}))
        peak = peak_stage(whole)
        return [b for b in feature_maps(program, self.problem.links) if (program.buffers[b].producer or 0) < peak]

    def _excess(self, above_bytes: int) -> int:
        return above_bytes - self.problem.above_budget_bytes

    def _leave(self, excess: int) -> None:
        """The next candidates leave, until their sizes meet ``excess``."""
        while self.waiting and excess > 0:
            b = self.waiting.pop(0)
            self.gone.append(b)
            excess -= self.program.buffers[b].bytes

    def _all_swapped(self) -> None:
        """Start with every candidate swapped (definition 2)."""
        excess = self._excess(unplanned_bytes(self.program))
        while self.waiting and excess > 0 and not self.problem.interrupt:
            self._leave(excess)
            self.swapped = set(self.gone)
            excess = self._excess(self.try_().above_bytes)

    def _recompute_first(self) -> None:
        """Recompute what leaves, but for what the peak needs (definition 3)."""
        outputs = read_outside(self.program, _joined(blocks_of(self.program)))
        peak = self._at_peak() if self.settings.all_swapped else set[int]()
        self.swapped = {b for b in self.gone if b in outputs or b in peak}
        self.try_()

    def _refine(self) -> bool:
        """Refine the plan once (definition 4); whether there was anything left to try."""
        left = [b for b in self.gone if b not in self.swapped]
        if left:
            peak = self._at_peak() if self.settings.new_peaks else set[int]()
            self.swapped.update([b for b in left if b in peak] or left[:1])
        elif self.waiting:
            assert not self.settings.all_swapped, "all that leave are swapped: that fits"
            self._leave(1)
            self.swapped.update(self.gone if not self.settings.recompute_first else ())
        else:
            return False
        self.try_()
        return True

    def _at_peak(self) -> set[int]:
        """What the runs of the stage at the peak read or make."""
        assert self.found is not None
        stage = peak_stage(self.found)
        runs = [stage, *(op for op, t in self.found.choice.reruns if t == stage)]
        ops = [self.program.ops[op] for op in runs if op < len(self.program.ops)]
        return {b for op in ops for b in (*op.inputs, *op.outputs)}

    def _fits(self) -> bool:
        return self.found is not None and self._excess(self.found.above_bytes) <= 0

    def _choice(self) -> Choice:
        """What leaves, and what of it is swapped, with each way back where it is needed."""
        program, gaps, tiers = self.program, dict[int, Gap](), Tiers(self.program, self.problem.links)
        for b in self.gone:
            leaves, back = last_forward_read(program, b), backward_reads(program, b)[0]
            if b not in self.swapped:
                gaps[b] = Gap(leaves, back)
            elif tiers_of(program, b, self.problem.links) and tiers.take(b):
                gaps[b] = Gap(leaves, back, load=back)
        return choice_of_gaps(program, gaps, tiers.of)

    def try_(self) -> Measured:
        """The plan of what leaves and what of it is swapped, without overlap."""
        self.problem.progress(Progress(f"{len(self.gone)} leave, {len(self.swapped)} of them swapped"))
        self.found = measured(self.problem, self._choice(), blocking=True, late_copies=True)
        return self.found

    def _overlapped(self) -> Measured | None:
        """What was found, with overlap where that is wanted."""
        if not self.settings.overlap:
            return self.found
        return measured(self.problem, prefetched(self.problem, self._choice()), late_loads=True)

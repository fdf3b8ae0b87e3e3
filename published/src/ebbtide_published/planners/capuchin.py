"""Capuchin: swap what has time to come back, recompute what saves most per second (Peng et al., ASPLOS 2020).

Definitions (gaps and chains are those of ``published.evicting``; times are those of the unplanned step, in place of a
measured first iteration):
1. An *access* makes a buffer or reads it. Between two accesses that follow each other, the *evicted access* and the
   *back access*, it may be away. Buffers count that may be away in the stage of the peak.
2. *Free time* is from the end of the way out, begun as the evicted access ends, to the begin of a way back that ends as
   the back access begins.
3. *Swap first*: buffers with the longest free time leave first, until their sizes are what the peak is over the budget,
   while free time hides both transfers. Transfers share lanes: a way out waits for those before it, a way back ends
   before the next one begins; where a lane has no time left for it, a buffer is not hidden.
4. *Recompute*: where no swap is hidden, buffers are made again at their back access, those first with the most memory
   saved per second (MSPS) of the chain as it is after what was chosen before. What cannot run again is swapped all the
   same, and so is what the chain of a new peak reads or makes, or what chains have made again and left there.
5. *In-trigger*: a way back begins at the last access of any buffer that is early enough, by the lane; where the budget
   has no room for it, later. *Feedback*: where a back access waits by the simulator, the way back is to be there sooner
   by that much, in at most :data:`ROUNDS` rounds, as long as that helps.

The published system tracks accesses while it runs, evicts on demand in its first iteration, and adjusts from one
iteration to the next; here the simulator stands for the iterations. After a choice the peak may be elsewhere: what is
over the budget then is chosen for anew. As what is chosen depends on by how much the peak is over, a smaller budget may
have the cheaper plan; that is the method's. The paper was read second-hand, through its abstract and notes on it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

from ebbtide.planners.base import Answer, Problem, Progress, Status
from ebbtide.planners.hybrid.choice import Choice
from ebbtide.planners.hybrid.floor import tiers_of
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner
from ebbtide.planners.search.reruns_from_kept import last_rerun_stage
from ebbtide.step.program import Program
from ebbtide.step.schedule import Compute, Reload
from ebbtide_published.planners.evicting import Gap, chain_of, choice_of_gaps
from ebbtide_published.planners.measured import Measured, measured, peak_stage
from ebbtide_published.planners.moving import (
    NO_TIER,
    Tiers,
    answer_of,
    begins,
    prefetched,
    unmoved,
)

__all__ = ["capuchin"]

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A buffer with its gap (definitions 1 and 2)."""

    buffer: int
    leaves: int
    back: int
    free_seconds: float


@planner("capuchin", moves=True, needs_tiers=True)
def capuchin(problem: Problem) -> Answer:
    """Swap where free time hides it, else recompute by memory saved per second."""
    if (unplanned := keep_all(problem)).status is Status.OPTIMAL:
        return unplanned
    if not problem.links:
        return unmoved(problem, NO_TIER)
    return _Capuchin(problem).answer()


class _Capuchin:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.program = problem, problem.program
        self.begins = begins(problem.program)
        self.tiers = Tiers(self.program, problem.links)
        self.gaps: dict[int, Gap] = {}
        self.forced: set[int] = set()  # swapped although that is not hidden
        self.last = [max(readers, default=-1) for readers in problem.program.readers]

    def answer(self) -> Answer:
        """Choose until the plan fits, then adjust the in-triggers."""
        choice, found = self._measured()
        while not self._fits(found) and not self.problem.interrupt:
            if not self._choose(found):
                break
            choice, found = self._measured()
        if self._fits(found):
            found = self._adjusted(choice, found)
        swapped = sum(gap.load is not None for gap in self.gaps.values())
        text = f"{swapped} swapped, {len(self.forced)} of them not hidden, {len(self.gaps) - swapped} recomputed"
        return answer_of(self.problem, found, {"chosen": text})

    def _fits(self, found: Measured) -> bool:
        return found.above_bytes <= self.problem.above_budget_bytes

    # -- what leaves ------------------------------------------------------------------------------------------

    def _choose(self, found: Measured) -> bool:
        """More buffers leave, for what is over the budget; whether there were any."""
        stage = peak_stage(found)
        excess = found.above_bytes - self.problem.above_budget_bytes
        around = self._candidates(stage)
        self.problem.progress(Progress(f"{len(self.gaps)} buffers leave"))
        before = len(self.gaps)
        for each in around:
            if excess <= 0:
                return True
            if self._swap_hidden(each):
                excess -= self.program.buffers[each.buffer].bytes
        excess = self._recompute([each for each in around if each.buffer not in self.gaps], excess)
        for each in around:
            if excess <= 0:
                return True
            if each.buffer not in self.gaps and self._swap(each):
                self.forced.add(each.buffer)
                excess -= self.program.buffers[each.buffer].bytes
        return len(self.gaps) > before or self._swap_chain(found, stage)

    def _candidates(self, stage: int) -> list[_Candidate]:
        """Buffers that could be away in a stage, the longest free time first (definition 1)."""
        program = self.program
        found: list[_Candidate] = []
        for b, readers in enumerate(program.readers):
            producer = program.buffers[b].producer
            if producer is None or b in self.gaps or b in program.pinned or b in program.mutations:
                continue
            if not program.buffers[b].bytes or not producer < stage < max(readers, default=-1):
                continue
            accesses = [producer, *readers]
            leaves, back = next((i, j) for i, j in pairwise(accesses) if j >= stage)
            if leaves < stage < back:
                found.append(_Candidate(b, leaves, back, self._free_seconds(b, leaves, back)))
        return sorted(found, key=lambda each: (-each.free_seconds, each.buffer))

    def _free_seconds(self, b: int, leaves: int, back: int) -> float:
        """Free time between two accesses, in seconds (definition 2); minus infinity for what no tier takes."""
        takes = tiers_of(self.program, b, self.problem.links)
        tier = next((tier for tier in self.problem.links if tier in takes), None)
        if tier is None:
            return float("-inf")
        link, size = self.problem.links[tier], self.program.buffers[b].bytes
        return self.begins[back] - link.seconds(size, "in") - self.begins[leaves + 1] - link.seconds(size, "out")

    def _swap(self, each: _Candidate) -> bool:
        if not tiers_of(self.program, each.buffer, self.problem.links) or not self.tiers.take(each.buffer):
            return False
        self.gaps[each.buffer] = Gap(each.leaves, each.back, load=each.back)
        return True

    def _swap_hidden(self, each: _Candidate) -> bool:
        """Swap a buffer if free time and lanes hide it (definition 3)."""
        if each.free_seconds < 0.0 or not self._swap(each):
            return False
        if self._lanes_hide():
            return True
        del self.gaps[each.buffer]
        return False

    def _lanes_hide(self) -> bool:
        """Whether every way back that is hidden begins after its way out has ended, with each lane one at a time."""
        links = self.problem.links
        moved = {b: gap for b, gap in self.gaps.items() if gap.load is not None and b not in self.forced}
        out_end: dict[int, float] = {}
        free: dict[str, float] = {}
        for b, gap in sorted(moved.items(), key=lambda each: (each[1].leaves, each[0])):
            lane = links[self.tiers.of[b]].lane("out")
            out_end[b] = free[lane] = max(free.get(lane, 0.0), self.begins[gap.leaves + 1]) + self.tiers.out_seconds(b)
        free.clear()
        for b, gap in sorted(moved.items(), key=lambda each: (-each[1].back, each[0])):
            lane = links[self.tiers.of[b]].lane("in")
            begin = min(free.get(lane, self.begins[-1]), self.begins[gap.back]) - self.tiers.in_seconds(b)
            if begin < out_end[b]:
                return False
            free[lane] = begin
        return True

    def _recompute(self, around: list[_Candidate], excess: int) -> int:
        """Recompute by MSPS (definition 4); the bytes that are left over the budget.

        What has left only makes chains longer, so that a rate that was the best and is no less now is the best.
        """
        heap = [(-rate, each.buffer, each) for each in around if (rate := self._saved_per_second(each)) > 0.0]
        heapq.heapify(heap)
        while heap and excess > 0:
            known, b, each = heapq.heappop(heap)
            rate = self._saved_per_second(each)
            if rate < -known:
                if rate > 0.0:
                    heapq.heappush(heap, (-rate, b, each))
                continue
            self.gaps[b] = Gap(each.leaves, each.back)
            excess -= self.program.buffers[b].bytes
        return excess

    def _saved_per_second(self, each: _Candidate) -> float:
        """MSPS; 0 for what cannot run again."""
        program, b = self.program, each.buffer
        producer = program.buffers[b].producer
        assert producer is not None
        if each.back > last_rerun_stage(program, producer) or b not in program.made_by_rerun(producer):
            return 0.0
        chain = chain_of(program, {**self.gaps, b: Gap(each.leaves, each.back)}, b, each.back)
        seconds = sum(program.ops[op].seconds for op in chain)
        return program.buffers[b].bytes / max(seconds, 1e-12)

    def _swap_chain(self, found: Measured, stage: int) -> bool:
        """Swap what is recomputed and read or made by the runs of a stage; whether there was anything.

        Where there is nothing, chains of other stages have left there what makes the peak: of what is recomputed and
        still read, what comes back last is swapped, until its sizes are what the peak is over the budget.
        """
        runs = [stage, *(op for op, t in found.choice.reruns if t == stage)]
        touched = {b for op in runs for b in (*self.program.ops[op].inputs, *self.program.ops[op].outputs)}
        done = False
        for b in sorted(touched.intersection(self.gaps)):
            done = self._swap_recomputed(b) or done
        if done:
            return True
        excess = found.above_bytes - self.problem.above_budget_bytes
        there = [b for b, gap in self.gaps.items() if gap.load is None and gap.leaves < stage <= self.last[b]]
        for b in sorted(there, key=lambda b: (-self.gaps[b].back, b)):
            if excess > 0 and self._swap_recomputed(b):
                excess -= self.program.buffers[b].bytes
                done = True
        return done

    def _swap_recomputed(self, b: int) -> bool:
        """Swap a buffer that is recomputed; whether it was, and there was room for it."""
        gap = self.gaps[b]
        if gap.load is not None or not self._swap(_Candidate(b, gap.leaves, gap.back, 0.0)):
            return False
        self.forced.add(b)
        return True

    # -- when it comes back -----------------------------------------------------------------------------------

    def _measured(self, sooner: dict[int, float] | None = None) -> tuple[Choice, Measured]:
        choice = choice_of_gaps(self.program, self.gaps, self.tiers.of)
        found = measured(self.problem, prefetched(self.problem, choice, sooner), late_loads=True)
        return choice, found

    def _adjusted(self, choice: Choice, found: Measured) -> Measured:
        """The plan after feedback (definition 5)."""
        sooner: dict[int, float] = {}
        best = found
        for _ in range(ROUNDS):
            waits = _waits(self.program, found)
            if not waits or self.problem.interrupt:
                break
            for b, seconds in waits.items():
                sooner[b] = sooner.get(b, 0.0) + seconds
            found = measured(self.problem, prefetched(self.problem, choice, sooner), late_loads=True)
            if not self._fits(found) or found.seconds >= best.seconds:
                break
            best = found
        return best


def _waits(program: Program, found: Measured) -> dict[int, float]:
    """Per buffer for how long its first reader waits for its way back."""
    waits: dict[int, float] = {}
    coming: set[int] = set()
    for index, action in enumerate(found.schedule.actions):
        match action:
            case Reload(buffer):
                coming.add(buffer)
            case Compute(op):
                for b in coming.intersection(program.ops[op].inputs):
                    if (seconds := float(found.timeline.wait_seconds[index])) > 0.0:
                        waits[b] = seconds
                coming.difference_update(program.ops[op].inputs)
            case _:
                pass
    return waits

"""TensorFlow Large Model Support: Le, Imai, Negishi, Kawachiya, arXiv 1807.02037 (version 1) and ISMM 2019 (version 2).

Definitions (*levels* and *swap-ins* are those of ``published.tflms_graph``); names are the published ones:
1. *Version 1* walks the forward breadth first from the ops that the backward reads first, and swaps the buffers that
   the backward reads, ``n_tensors`` of them. With ``branch_threshold`` it swaps those too that a forward op reads more
   than so many levels after the first one does.
2. Its trigger: ``direct_order`` takes an op on a path to the reader whose level is more than ``lb`` and less than
   ``ub`` before the reader's, the nearest. ``chain_rule`` walks the forward from the op that makes the buffer, at least
   ``lb`` and less than ``ub`` steps, and takes a backward op that reads what is made there; next to the boundary it is
   ``direct_order``. Without any the buffer comes back at once, so that it might as well stay: it stays.
3. Each reader has a swap-in of its own; ``fuse_swapins`` makes one of them.
4. *Version 2* swaps every buffer, of the backward too, for readers more than ``swapout_threshold`` levels after it is
   made. Readers within ``swapin_groupby`` levels of each other share a swap-in. Its trigger is an op on a path to the
   reader, more than ``swapin_ahead`` levels before it and at most ten further; without any, it comes right before.
5. ``sync_mode`` 1 and 3: computing waits for what is copied out, where it leaves; 2 and 3: each comes back right before
   its reader. ``serialization``: levels, as slices joined by ``+``, or ``all``.
6. *Auto-tuning* of version 2, on a simulator: a bisection for the largest ``swapout_threshold`` at which the step
   fits, with the next ``sync_mode`` where none does; then for the largest ``swapin_ahead``; then ``swapin_groupby``:
   all levels if that fits, else the first value of a bisection that does. Their simulator counts bytes alone; ours is
   the one that judges all plans.

Version 1 has no tuning: without ``n_tensors`` the fewest are searched that fit, which is ours. Buffers have no shape
here; the link's least size stands for the rule that one-dimensional tensors stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ebbtide.planners.base import Answer, Problem, Progress, Status
from ebbtide.planners.hybrid.choice import Choice
from ebbtide.planners.hybrid.floor import tiers_of
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner
from ebbtide.planners.settings import setting
from ebbtide_published.planners.measured import Measured, measured
from ebbtide_published.planners.moving import (
    NO_TIER,
    Tiers,
    answer_of,
    backward_reads,
    count_that_fits,
    unmoved,
)
from ebbtide_published.planners.tflms_graph import Levels, SwapIn, loads_of

__all__ = ["TflmsSettings", "tflms"]

BACK = 10  # levels in which version 2 looks for a trigger
MOST_SYNC = 3
FIRST = ("n_tensors", "lb", "ub", "branch_threshold", "fuse_swapins", "ctrld_strategy")
SECOND = ("swapout_threshold", "swapin_ahead", "swapin_groupby", "sync_mode", "serialization")


@dataclass(frozen=True, kw_only=True)
class TflmsSettings:
    """What may follow the name, with the published defaults; which version, if nothing says so, the settings tell."""

    version: int | None = setting(None, words=("1", "2"))
    n_tensors: int | None = setting(None, least=0)
    """0 turns it off; more than there are: all."""
    lb: int = setting(1, least=0)
    ub: int = setting(10_000, least=1)
    branch_threshold: int | None = setting(None, least=0)
    fuse_swapins: bool = setting(False)
    ctrld_strategy: str = setting("chain_rule", words=("chain_rule", "direct_order"))
    swapout_threshold: int | None = setting(None, least=0)
    swapin_ahead: int | None = setting(None, least=0)
    swapin_groupby: int | None = setting(None, least=0)
    sync_mode: int = setting(0, words=("0", "1", "2", "3"))
    serialization: str = setting("", free="levels as slices joined by +, such as 1+3:5, or all")

    def __post_init__(self) -> None:
        plain = {name: each.default for name, each in type(self).__dataclass_fields__.items()}
        first, second = ([name for name in names if getattr(self, name) != plain[name]] for names in (FIRST, SECOND))
        if first and (second or self.version == 2):
            other = f"{second[0]} is not" if second else "not of version 2"
            raise ValueError(f"{first[0]} is a setting of version 1, {other}")
        if second and self.version == 1:
            raise ValueError(f"{second[0]} is a setting of version 2")
        if self.lb > self.ub:
            raise ValueError(f"lb={self.lb} is more than ub={self.ub}")
        object.__setattr__(self, "version", self.version or (1 if first else 2))
        _levels_named(self.serialization, 0)


@planner("tflms", moves=True, needs_tiers=True, settings=TflmsSettings)
def tflms(problem: Problem) -> Answer:
    """The plan of the settings; without them, of those that the published tuning finds."""
    settings: TflmsSettings = problem.settings or TflmsSettings()
    if not problem.links:
        return unmoved(problem, NO_TIER)
    if settings.version == 1:
        return _first(problem, settings)
    return _Tuning(problem, settings).answer()


# -- version 1 ----------------------------------------------------------------------------------------------


def _first(problem: Problem, settings: TflmsSettings) -> Answer:
    if settings.n_tensors is None and (unplanned := keep_all(problem)).status is Status.OPTIMAL:
        return unplanned
    walk = _Walk(problem, settings)
    tensors = walk.tensors()
    if not tensors or settings.n_tensors == 0:
        return unmoved(problem, "n_tensors=0" if tensors else "no buffer may leave")

    def plan(count: int) -> Measured:
        swap_ins = [each for b, readers in tensors[:count] for each in walk.swap_ins(b, readers)]
        return _measured(problem, swap_ins, blocking=False)

    count = min(settings.n_tensors or 0, len(tensors))
    if count:
        found = plan(count)
    else:
        count, found = count_that_fits(problem, len(tensors), plan, "tensors")
    return answer_of(problem, found, {"chosen": f"n_tensors={count} of {len(tensors)}"})


class _Walk:
    """The walk of version 1 (definitions 1 to 3)."""

    def __init__(self, problem: Problem, settings: TflmsSettings) -> None:
        self.problem, self.program, self.settings = problem, problem.program, settings
        self.levels = Levels(problem.program)
        self._successors = [
            sorted({r for b in op.outputs for r in self.program.readers[b] if r < self.program.boundary})
            for op in self.program.ops[: self.program.boundary]
        ]

    def tensors(self) -> list[tuple[int, list[int]]]:
        """Buffers in the order of the walk, each with the readers that a swap-in serves."""
        program = self.program
        forward = range(program.boundary)
        queue = self.levels.first_of(
            op for op in forward if any(backward_reads(program, b) for b in program.ops[op].outputs)
        )
        seen = set(queue)
        found: list[tuple[int, list[int]]] = []
        for op in queue:  # it grows
            for b in program.ops[op].outputs:
                if readers := self._readers(b):
                    found.append((b, readers))
            fresh = [each for each in self._successors[op] if each not in seen]
            seen.update(fresh)
            queue.extend(fresh)
        return found

    def _readers(self, b: int) -> list[int]:
        program, threshold = self.program, self.settings.branch_threshold
        if not tiers_of(program, b, self.problem.links):
            return []
        readers = backward_reads(program, b)
        forward = [r for r in program.readers[b] if r < program.boundary]
        if threshold is not None and forward:
            least = min(self.levels.of[r] for r in forward) + threshold
            readers = [r for r in forward if self.levels.of[r] > least] + readers
        return readers

    def swap_ins(self, b: int, readers: list[int]) -> list[SwapIn]:
        """The swap-ins of a buffer; none for readers without a trigger."""
        producer = self.program.buffers[b].producer
        assert producer is not None
        found: list[SwapIn] = []
        if self.settings.fuse_swapins and len(readers) > 1:
            earliest = min(readers, key=lambda r: (self.levels.of[r], r))
            groups = [(earliest, tuple(readers))]
        else:
            groups = [(r, (r,)) for r in readers]
        for reader, served in groups:
            trigger = self._trigger(producer, reader)
            if trigger is not None:
                found.append(SwapIn(b, served, trigger))
        return found

    def _trigger(self, producer: int, reader: int) -> int | None:
        """The op that triggers a swap-in (definition 2)."""
        of, lb, ub = self.levels.of, self.settings.lb, self.settings.ub
        if of[reader] - lb <= of[producer]:
            lb = 1
        near = of[reader] - lb < self.levels.backward
        if self.settings.ctrld_strategy == "direct_order" or near:
            lowest = max(of[reader] - ub, of[producer]) + 1
            return self.levels.trigger(reader, range(of[reader] - lb - 1, lowest - 1, -1))
        ring, seen = [producer], {producer}
        for step in range(ub):
            if step >= lb and (found := self._read_there(ring, producer, reader)):
                return found[-1]
            ring = sorted({each for op in ring for each in self._successors[op] if each not in seen})
            seen.update(ring)
            if not ring:
                break
        return None

    def _read_there(self, ring: list[int], producer: int, reader: int) -> list[int]:
        """Backward ops that read what the ops of a ring make, with levels between ``producer`` and ``reader``."""
        program, of = self.program, self.levels.of
        ops = {r for op in ring for b in program.ops[op].outputs for r in backward_reads(program, b)}
        return sorted(r for r in ops if of[producer] < of[r] < of[reader])


# -- version 2 ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tuned:
    threshold: int
    ahead: int
    groupby: int
    sync: int

    def __str__(self) -> str:
        known = f"swapout_threshold={self.threshold}"
        if self.sync < 2:
            known += f",swapin_ahead={self.ahead},swapin_groupby={self.groupby}"
        return f"{known},sync_mode={self.sync}"


class _Tuning:
    """The auto-tuning of version 2 (definition 6)."""

    def __init__(self, problem: Problem, settings: TflmsSettings) -> None:
        self.problem, self.settings = problem, settings
        plain = Levels(problem.program)
        named = _levels_named(settings.serialization, plain.size)
        self.levels = Levels(problem.program, named) if named else plain
        self._known: dict[_Tuned, Measured] = {}

    def answer(self) -> Answer:
        """The plan of the settings, tuned where they are left out."""
        asked = self.settings
        free = (asked.swapout_threshold, asked.swapin_ahead, asked.swapin_groupby)
        if all(each is None for each in free):
            unplanned = keep_all(self.problem)
            if unplanned.status is Status.OPTIMAL:
                return unplanned
        tuned = self._tuned()
        found = self.play(tuned)
        return answer_of(self.problem, found, {"chosen": str(tuned) if found.choice.loads else f"nothing: {tuned}"})

    def _tuned(self) -> _Tuned:
        asked, size = self.settings, self.levels.size
        at = _Tuned(asked.swapout_threshold or 0, asked.swapin_ahead or 0, asked.swapin_groupby or 0, asked.sync_mode)
        if asked.swapin_ahead is None:
            at = replace(at, ahead=1)
        if asked.swapout_threshold is None:
            at = replace(at, threshold=1)
            while not self._fits(at):
                if at.sync == MOST_SYNC:
                    return at
                at = replace(at, sync=at.sync + 1)
            at = self._bisected(at, 1, lambda value, sync: replace(sync, threshold=value))
        if at.sync >= 2:
            return at
        if asked.swapin_ahead is None:
            if not self._fits(at):
                return replace(at, sync=MOST_SYNC)
            at = self._bisected(at, 1, lambda value, each: replace(each, ahead=value))
        if asked.swapin_groupby is None:
            if not self._fits(at):
                return replace(at, sync=MOST_SYNC)
            if self._fits(replace(at, groupby=size)):
                return replace(at, groupby=size)
            at = self._bisected(at, 0, lambda value, each: replace(each, groupby=value), first=True)
        return at

    def _bisected(
        self, at: _Tuned, low: int, with_value: Callable[[int, _Tuned], _Tuned], *, first: bool = False
    ) -> _Tuned:
        """The settings of a bisection for the largest value that fits; with ``first``, of the first that does."""
        high = self.levels.size
        while low <= high and not self.problem.interrupt:
            middle = (low + high) // 2
            tried = with_value(middle, at)
            if self._fits(tried):
                at, low = tried, middle + 1
                if first:
                    break
            else:
                high = middle - 1
        return at

    def _fits(self, at: _Tuned) -> bool:
        self.problem.progress(Progress(f"trying {at}"))
        return self.play(at).above_bytes <= self.problem.above_budget_bytes

    def play(self, at: _Tuned) -> Measured:
        """What settings come to (definitions 4 and 5)."""
        if at not in self._known:
            swap_ins = [each for b in range(len(self.problem.program.buffers)) for each in self._swap_ins(b, at)]
            self._known[at] = _measured(self.problem, swap_ins, blocking=at.sync in (1, 3))
        return self._known[at]

    def _swap_ins(self, b: int, at: _Tuned) -> list[SwapIn]:
        program, of = self.problem.program, self.levels.of
        producer = program.buffers[b].producer
        if producer is None or not tiers_of(program, b, self.problem.links):
            return []
        readers = [r for r in program.readers[b] if of[r] - of[producer] > at.threshold]
        found: list[SwapIn] = []
        for group in self._groups(readers, at.groupby):
            first = min(group, key=lambda r: (of[r], r))
            trigger = None if at.sync >= 2 else self._trigger(producer, first, at.ahead)
            found.append(SwapIn(b, tuple(sorted(group)), trigger))
        return found

    def _groups(self, readers: list[int], limit: int) -> list[list[int]]:
        """Readers that share a swap-in: each within ``limit`` levels of the one before; 0 shares none."""
        groups: list[list[int]] = []
        for r in sorted(readers, key=lambda each: (self.levels.of[each], each)):
            if limit and groups and self.levels.of[r] - self.levels.of[groups[-1][-1]] <= limit:
                groups[-1].append(r)
            else:
                groups.append([r])
        return groups

    def _trigger(self, producer: int, reader: int, ahead: int) -> int | None:
        above = self.levels.of[reader] - ahead
        lowest = max(above - BACK, self.levels.of[producer] + 1)
        return self.levels.trigger(reader, range(above - 1, lowest - 1, -1))


def _measured(problem: Problem, swap_ins: list[SwapIn], *, blocking: bool) -> Measured:
    tiers = Tiers(problem.program, problem.links)
    loads = loads_of(problem.program, swap_ins, tiers)
    return measured(problem, Choice(loads=loads, tiers=tiers.of), blocking=blocking)


def _levels_named(text: str, size: int) -> set[int]:
    """The levels that slices joined by ``+`` name, of ``size``.

    Raises:
        ValueError: if a piece is no slice of whole numbers.
    """
    if text in ("", "all"):
        return set(range(size)) if text else set()
    named: set[int] = set()
    for piece in text.split("+"):
        first, colon, last = piece.partition(":")
        ends = [int(each) for each in (first, last) if each.isdecimal()]
        if len(ends) != (bool(first) + bool(last)) or not (first or last):
            raise ValueError(f"serialization={text}: {piece!r} is no level or slice of levels such as 3:5")
        begin = int(first) if first else 0
        named.update(range(size)[begin : int(last) if last else size] if colon else range(size)[begin : begin + 1])
    return named

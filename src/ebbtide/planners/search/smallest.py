"""The least peak for which a schedule is found: descend from the unplanned step as far as repairing works.

Every plan asks for it, so this module is imported with the public functions: numba, which takes half a second to load,
is not, before a descent begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ebbtide.planners.base import DEFAULT_EFFORT, Answer, Interrupt, Problem, Status
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.reductions.carried import carried
from ebbtide.planners.registry import planner
from ebbtide.step.arrays import flat
from ebbtide.step.machine import Link
from ebbtide.step.program import Program, analysis
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate

if TYPE_CHECKING:
    from ebbtide.planners.search.interval_state import IntervalState

__all__ = ["forget_smallest", "least_memory", "note_alike", "smallest_of", "smallest_schedule"]

RUNS_PER_MOVE = 3000  # walked per unit of effort: about 10 s for the default effort, on the worst programs
FULL_WORK_OPS = 2500  # beyond, less work in inverse proportion: a step down walks more the larger the program is
FEW_MOVES = 200  # of a proxy's first descent: it ends near its floor, and most of it is still regular
NEAR_ENOUGH = 1.1  # where a proxy's schedule is carried: descending a large program takes long
ENOUGH = 1.015  # times the floor: the last percent takes most of the time, and is needed by nobody
FIRST_EFFORT = DEFAULT_EFFORT
"""Moves of the search that every first plan makes; whoever wants first plans quickly, as tests do, sets it lower."""


def _ignore(_: int) -> None:
    """Ignore the bytes that were reached."""


def smallest_schedule(
    program: Program,
    effort: int = DEFAULT_EFFORT,
    interrupt: Interrupt | None = None,
    tell: Callable[[int], None] = _ignore,
    start: Sequence[tuple[int, int]] = (),
) -> tuple[int, Schedule]:
    """A schedule with a peak as low as is found, or within 1.5 % of the floor, whatever its time.

    Args:
        program: with costs.
        effort: local-search moves in all.
        interrupt: when to stop with what was reached.
        tell: called with the bytes above the step's start that some schedule reaches, whenever one is found.
        start: reruns of a schedule that is known to be low.

    Returns:
        Bytes above the step's start, and the schedule.
    """
    from ebbtide.planners.reductions.proxy import proxy_of
    from ebbtide.planners.search.interval_state import IntervalState

    state = IntervalState(program)
    floor, _ = floor_bytes(program)
    interrupt = interrupt or Interrupt()
    peaks = [(state.peak_bytes, state.reruns)]
    if (small := proxy_of(program)) is not None:
        for moves in (min(FEW_MOVES, effort), effort):
            for lifted in small.lift(_descended(IntervalState(small.program), moves, interrupt, early=False)):
                state.load(lifted)
                peaks.append((state.peak_bytes, lifted))
                tell(state.peak_bytes)
            if min(peaks)[0] <= NEAR_ENOUGH * floor:
                break
    enough = (ENOUGH if small is None else NEAR_ENOUGH) * floor
    if small is None and start:
        peaks += _descended_from(start, program, enough, effort // 2, interrupt, tell)
        state.load(min(peaks)[1])
        schedule = state.to_schedule()
        return simulate(program, schedule).above_bytes, schedule
    descents = [(state, False)]
    if small is None:  # on a large program each takes seconds
        even = IntervalState(_evened(program))
        descents += [(state, True), (even, False), (even, True)]
    for each, early in descents:
        if min(peaks)[0] > enough and not interrupt:
            _descended(each, effort // 2, interrupt, early=early, tell=tell)
            peaks.append((each.peak_bytes, each.reruns))
    if small is not None and min(peaks)[0] > enough and not interrupt:  # what was carried fits its blocks, not the rest
        state = IntervalState(program)  # one that has held many reruns walks over their rows, which is work
        _descended(state, effort, interrupt, early=False, start=min(peaks)[1], tell=tell)
        peaks.append((state.peak_bytes, state.reruns))
    state.load(min(peaks)[1])
    schedule = state.to_schedule()
    return simulate(program, schedule).above_bytes, schedule


def _descended_from(
    start: Sequence[tuple[int, int]],
    program: Program,
    enough: float,
    effort: int,
    interrupt: Interrupt,
    tell: Callable[[int], None],
) -> list[tuple[int, list[tuple[int, int]]]]:
    """Peaks that three descents from ``start`` reach, two of them from there and one from the better of these.

    They take the place of four from the unplanned step, which were as low or 0.4 % higher on the rewritten steps of six
    transformers (the least over each step's programs).
    """
    from ebbtide.planners.search.interval_state import IntervalState

    found: list[tuple[int, list[tuple[int, int]]]] = []
    for each, early in ((program, False), (program, True), (_evened(program), True)):
        if not interrupt and (not found or min(found)[0] > enough):
            state = IntervalState(each)  # one that has held many reruns walks over their rows, which is work
            begin = start if len(found) < 2 else min(found)[1]
            _descended(state, effort, interrupt, early=early, start=begin, tell=tell)
            found.append((state.peak_bytes, state.reruns))
    return found


def _evened(program: Program) -> Program:
    """Give all ops the same seconds: they decide what a descent tries, not what the least peak is."""
    return replace(program, ops=tuple(replace(op, seconds=1.0) for op in program.ops))


def _descended(
    state: IntervalState,
    effort: int,
    interrupt: Interrupt,
    *,
    early: bool,
    start: Sequence[tuple[int, int]] = (),
    tell: Callable[[int], None] = _ignore,
) -> Schedule:
    """The schedule to which one descends from the unplanned step, or from the reruns of ``start``.

    Reruns are placed ``early`` or right before use.

    A rerun long before its use, or moves at random, give every block another pattern: what a few blocks can hold, more
    of them cannot. On other programs now the one reaches less, now the other.
    """
    from ebbtide.planners.search import local_search

    program = state.program
    floor, _ = floor_bytes(program)
    state.load([*start])
    state.allow_early(early)
    state.allow_work(round(effort * RUNS_PER_MOVE * min(1.0, FULL_WORK_OPS / len(program.ops))))
    local_search.descend(state, int(ENOUGH * floor), 0, interrupt, moves=effort, tell=tell)
    return state.to_schedule()


_SMALLEST: dict[object, tuple[int, Schedule]] = {}
_ALIKE: dict[str, tuple[Program, ...]] = {}


def note_alike(program: Program, others: Sequence[Program]) -> None:
    """``program`` is of the same step as ``others``, but for a few ops: the lowest that is known of these starts it."""
    if len(_ALIKE) > 32:
        _ALIKE.clear()
    _ALIKE[_identity(program)] = tuple(others)


def _start_of(program: Program, effort: int) -> list[tuple[int, int]]:
    """Reruns to start from (:func:`note_alike`); none if nothing is known.

    Nor where the floor is lower than the other's: what keeps that one up may be gone here.
    """
    from ebbtide.planners.search.interval_state import reruns_of

    alike = [each for each in _ALIKE.get(_identity(program), ()) if floor_bytes(each)[0] <= floor_bytes(program)[0]]
    known = [(each, _SMALLEST.get((_identity(each), effort, ()))) for each in alike]
    found = [(answer[0], index) for index, (_, answer) in enumerate(known) if answer is not None]
    if not found:
        return []
    other, answer = known[min(found)[1]]
    assert answer is not None
    return carried(other, reruns_of(other, answer[1]) or [], program)


def smallest_of(
    program: Program,
    effort: int | None = None,
    interrupt: Interrupt | None = None,
    links: Mapping[str, Link] | None = None,
    tell: Callable[[int], None] = _ignore,
) -> tuple[int, Schedule]:
    """The least peak above the start for which a schedule was found, bytes, and that schedule; kept per program.

    Args:
        program: with costs.
        effort: as for :func:`smallest_schedule`; :data:`FIRST_EFFORT` by default.
        interrupt: likewise.
        links: to the tiers that buffers may be moved to.
        tell: as for :func:`smallest_schedule`.
    """
    effort = FIRST_EFFORT if effort is None else effort
    key = (_identity(program), effort, tuple(sorted(links.items())) if links else ())
    if key not in _SMALLEST:
        if len(_SMALLEST) > 32:
            _SMALLEST.clear()
        if links:
            from ebbtide.planners.hybrid.smallest import smallest_with_tiers

            start = smallest_of(program, effort, interrupt, tell=tell)[1]
            found = smallest_with_tiers(program, links, start, effort, interrupt or Interrupt(), tell)
        else:
            start = _start_of(program, effort)
            found = smallest_schedule(program, effort=effort, interrupt=interrupt, tell=tell, start=start)
        if interrupt:
            return found  # cut short: a later call may find less
        _SMALLEST[key] = found
    return _SMALLEST[key]


@analysis
def _identity(program: Program) -> str:
    """A digest of all that a schedule and its bytes and seconds depend on."""
    digest = hashlib.sha256()
    for array in flat(program).arrays():
        digest.update(array.tobytes())
    digest.update("\n".join(op.target for op in program.ops).encode())
    digest.update(repr(sorted(program.movable)).encode())
    digest.update(repr((program.boundary, program.between_bytes, program.held_bytes)).encode())
    return digest.hexdigest()


def forget_smallest() -> None:
    """Forget what this process knows of smallest peaks, as a new one would."""
    _SMALLEST.clear()
    _ALIKE.clear()


@planner("least_memory", moves=True)
def least_memory(problem: Problem) -> Answer:
    """The schedule with the least peak that is found, whatever its time."""
    program = problem.program
    seeds = [seed for seed in problem.seeds if problem.links or not seed.moves]
    peaks = [(simulate(program, seed, problem.machine).above_bytes, index) for index, seed in enumerate(seeds)]
    found, schedule = (0, None) if peaks else _least(problem)
    if schedule is None:
        found, index = min(peaks)
        schedule = seeds[index]
    if found > problem.above_budget_bytes:
        return Answer(Status.INFEASIBLE, None)
    return Answer(Status.FEASIBLE, schedule)


def _least(problem: Problem) -> tuple[int, Schedule]:
    if problem.links:
        return smallest_of(problem.program, problem.effort, problem.interrupt, problem.links)
    return smallest_schedule(problem.program, problem.effort, problem.interrupt)

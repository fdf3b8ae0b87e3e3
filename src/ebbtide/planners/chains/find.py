"""Paths through a program: ops that each read what the one before made, and when the backward asks for it.

Definitions:
1. A *path* is a sequence of buffers, its *states*: the producer of each reads the one before. So a state that is not
   resident can only be made again from a resident state below it, by every op in between, or from the path's first
   op on. What else those ops read does not matter here.
2. An op off the path that reads a state *asks* for it at its first run. Of the states, as many as possible are chosen
   for which ops that come later in the program ask for lower states. The backward of a chain asks for all that it
   reads in that order.
3. A *step* is a state that is asked for and the states between it and the next such state below. Steps count
   from the path's start. States above the highest one that is asked for belong to no step.
4. Paths end before the *turn*: the boundary, or the stage of the unplanned peak where the boundary says nothing.
5. A program is a *chain* if hardly anything but the state is read across nine in ten of the states that are asked for:
   what is made up to it and read between it and the turn. Other programs have paths too, but what runs beside the
   path decides there.

A path of states that are all large is worth more than a longer one through a mean: so after the path with the most
seconds, the ones through larger states alone are looked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, takewhile

from ebbtide.step.program import Program
from ebbtide.step.schedule import Compute
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule

__all__ = ["Path", "chains_of", "paths_of"]

PATHS = 6  # looked for at most, each through states of at least twice the least bytes of the one before
LEAST_SHARE = 0.4  # of the seconds of the first path: a path with less bounds too little
CHAIN_SHARE, MOST_CROSSING = 0.9, 1.5  # definition 5: a second branch crosses with as many bytes again


@dataclass(frozen=True)
class Path:
    """The steps of a path.

    Attributes:
        steps: per step, its states from the lowest to the one that is asked for (definition 3).
        asked_by: per step, the op that asks for its last state; never ascending.
    """

    steps: tuple[tuple[int, ...], ...]
    asked_by: tuple[int, ...]

    @property
    def states(self) -> tuple[int, ...]:
        """All states, from the lowest."""
        return tuple(b for step in self.steps for b in step)


def chains_of(program: Program) -> Iterator[Path]:
    """The paths of :func:`paths_of` as long as the program is a chain along them (definition 5)."""
    crossing = _crossing(program, _turn(program))
    return takewhile(lambda path: _is_chain(program, path, crossing), paths_of(program))


def paths_of(program: Program) -> Iterator[Path]:
    """Paths of a program that somebody asks for, each through larger states than the one before."""
    turn = _turn(program)
    least_bytes, first_seconds = 0, 0.0
    for _ in range(PATHS):
        states = _longest(program, turn, least_bytes)
        seconds = sum(program.ops[o].seconds for b in states if (o := program.buffers[b].producer) is not None)
        if not states or seconds < LEAST_SHARE * first_seconds:
            return
        first_seconds = first_seconds or seconds
        path = _path(program, turn, states)
        if path.steps:
            yield path
        least_bytes = 2 * max(min(program.buffers[b].bytes for b in states), 1)


def _turn(program: Program) -> int:
    """Where paths end (definition 4)."""
    if 0 < program.boundary < len(program.ops):
        return program.boundary
    schedule = unplanned_schedule(program)
    action = schedule.actions[simulate(program, schedule).peak_action] if schedule.actions else None
    return action.op if isinstance(action, Compute) else len(program.ops)


def _crossing(program: Program, turn: int) -> list[int]:
    """Per op before the turn, bytes made up to it that ops between it and the turn read."""
    change = [0] * (turn + 1)
    for b, buffer in enumerate(program.buffers):
        last = max((r for r in program.readers[b] if r < turn), default=-1)
        if buffer.producer is not None and buffer.producer < last:
            change[buffer.producer] += buffer.bytes
            change[last] -= buffer.bytes
    return list(accumulate(change))


def _is_chain(program: Program, path: Path, crossing: list[int]) -> bool:
    """Whether hardly anything but the state is read across most states of a path (definition 5)."""
    states = [program.buffers[step[-1]] for step in path.steps]
    alone = sum(crossing[each.producer or 0] <= MOST_CROSSING * each.bytes for each in states)
    return alone >= CHAIN_SHARE * len(states)


def _longest(program: Program, turn: int, least_bytes: int) -> list[int]:
    """The states of the path with the most seconds whose states have at least so many bytes."""
    best: dict[int, tuple[float, int]] = {}  # per state: seconds of the best path that ends there, the state before
    for index, op in enumerate(program.ops[:turn]):
        seconds, before = max(((best[b][0], b) for b in op.inputs if b in best), default=(0.0, -1))
        made = [b for b in op.outputs if b not in program.pinned and program.buffers[b].bytes >= max(least_bytes, 1)]
        for b in made:
            best[b] = (seconds + program.ops[index].seconds, before)
    b = max(best, key=lambda each: (best[each][0], each), default=-1)
    states: list[int] = []
    while b >= 0:
        states.append(b)
        b = best[b][1]
    return states[::-1]


def _path(program: Program, turn: int, states: list[int]) -> Path:
    """The steps of a path (definitions 2 and 3), by the longest sequence of last readers that never ascends."""
    asked = [max((t for t in program.readers[b] if t >= turn), default=-1) for b in states]
    # Patience sorting from the highest state down, where the ops that ask must not descend.
    ends: list[int] = []
    top: list[int] = []
    below: dict[int, int] = {}
    for i in range(len(states) - 1, -1, -1):
        if asked[i] < 0:
            continue
        place = bisect_right(ends, asked[i])
        below[i] = top[place - 1] if place else -1
        ends[place : place + 1], top[place : place + 1] = [asked[i]], [i]
    chosen: list[int] = []
    i = top[-1] if top else -1
    while i >= 0:
        chosen.append(i)
        i = below[i]
    steps: list[tuple[int, ...]] = []
    first = 0
    for i in chosen:
        steps.append(tuple(states[first : i + 1]))
        first = i + 1
    return Path(tuple(steps), tuple(asked[i] for i in chosen))

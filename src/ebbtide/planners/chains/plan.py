"""Start points for chains: the recurrence of ``chains.bound`` with sizes rounded up, made a plan.

While a step is reversed (from the first run of the op that asked for the step above to that of the op that asks for
it), the states of the steps that the table holds then are held; so is what the backward made, and of the forward what
it has read, until it has read it last. All else is made again where it is read, by the fewest reruns
(``reruns_from_kept``).

What the bound leaves out is counted: what the backward has made and will read, and what running steps again takes
while they are made. On unit chains the plan is Revolve's, whose cost is the bound. Elsewhere what ops read off the
path makes it a start point for repair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebbtide.planners.chains.bound import cost_of_steps, path_bounds
from ebbtide.planners.chains.find import Path
from ebbtide.planners.chains.table import NO_PLAN, PathTable, Steps, finest
from ebbtide.planners.search.greedy import PROVEN, Incumbent, start_from
from ebbtide.planners.search.jit import Ints
from ebbtide.planners.search.reruns_from_kept import Residents, reruns_for_residents
from ebbtide.step.program import Program

__all__ = ["path_reruns", "start_from_paths"]


def start_from_paths(incumbent: Incumbent) -> None:
    """Offer the plans of the paths of a chain, repaired, and raise the bound of ``incumbent`` to what they prove."""
    problem = incumbent.problem
    incumbent.tell("chains")
    tried: list[list[tuple[int, int]]] = []
    for each in path_bounds(problem.program, problem.above_budget_bytes):
        incumbent.bound = max(incumbent.bound or 0.0, each.bound)
        if problem.interrupt or each.infeasible or incumbent.overhead <= incumbent.bound + PROVEN:
            return
        reruns = path_reruns(problem.program, problem.above_budget_bytes, each.path) if each.bound > 0 else None
        if reruns is None or reruns in tried:
            continue
        tried.append(reruns)
        incumbent.state.load(reruns)
        if (
            not incumbent.offer() or incumbent.overhead > incumbent.bound + PROVEN
        ):  # where it is optimal, there is nothing to mend
            start_from(incumbent, reruns)
        incumbent.tell("chains")


def path_reruns(program: Program, budget: int, path: Path) -> list[tuple[int, int]] | None:
    """The reruns ``(op, stage)`` of the plan that the recurrence gives; ``None`` if it gives none.

    Args:
        program: with costs.
        budget: bytes above the step's start.
        path: of the program.
    """
    lives = _lives(program, path)
    steps = _steps(program, budget, path, lives)
    table = None if steps is None else PathTable(steps)
    if table is None or table.least >= NO_PLAN:
        return None
    return reruns_for_residents(program, _residents(program, path, lives, table))


@dataclass(frozen=True)
class _Lives:
    """When buffers are resident, shape ``(buffers,)`` each; the path's turn is where its top state is made.

    Attributes:
        born: the op that makes it; the number of ops for tangents.
        dropped: the last op up to the turn that reads it, -1 if none does; where it may be dropped.
        again: the first op after the turn that reads it, the number of ops if none does.
        last: the last op that reads it.
        droppable: whether it is made before the turn and may be made again after it.
    """

    born: Ints
    dropped: Ints
    again: Ints
    last: Ints
    droppable: NDArray[np.bool_]


def _lives(program: Program, path: Path) -> _Lives:
    end = len(program.ops)
    top, turn = program.buffers[path.steps[-1][-1]].producer or 0, min(path.asked_by)
    born = np.array([end if b.producer is None else b.producer for b in program.buffers])
    free = np.array([op.rerunnable and not op.reads_mutated for op in program.ops] + [False])
    kept = program.pinned.union(program.mutations)
    return _Lives(
        born,
        np.array([max((r for r in readers if r < turn), default=-1) for readers in program.readers]),
        np.array([next((r for r in readers if r >= turn), end) for readers in program.readers]),
        np.array([max(readers, default=-1) for readers in program.readers]),
        (born < top) & free[born] & np.array([b not in kept for b in range(len(program.buffers))]),
    )


def _steps(program: Program, budget: int, path: Path, lives: _Lives) -> Steps | None:
    """Steps for the table, sizes rounded up and rooms down."""
    count = len(path.steps)
    asked = [step[-1] for step in path.steps]
    size = [program.buffers[b].bytes for b in asked]
    first, run = _running(program, path)
    readers = [[r for r in program.readers[b] if r >= lives.again[b]] for b in asked]
    others = _others(program, path, lives)
    room = [budget - max(others[r] for r in each) for each in readers]
    room[-1] = budget  # the first runs
    place = {b: i for i, b in enumerate(path.states)}

    def reading(r: int, b: int) -> int:
        """Bytes there while op ``r`` reads state ``b``, what is held of lower steps left out."""
        higher = sum(program.buffers[x].bytes for x in program.ops[r].inputs if place.get(x, -1) >= place[b])
        return int(others[r]) + _during(program, r) + higher

    free = [budget - max(reading(r, b) for r in each) for each, b in zip(readers, asked, strict=True)]
    if min(free) < 0 or min(room) < 0:
        return None
    cost = cost_of_steps(program, path)

    def in_units(unit: int, units: int) -> Steps:
        price = np.where(np.arange(units + 1)[None, :] * unit <= np.array(free)[:, None], 0, NO_PLAN)
        up = [-(-np.array(each, np.int64) // unit) for each in (size, first, run)]
        return Steps(up[0], cost, price, up[1], up[2], np.array(room, np.int64) // unit, False)

    return finest(in_units, count, max(free) + max(size), math.gcd(*size))


def _running(program: Program, path: Path) -> tuple[list[int], list[int]]:
    """Per step, bytes that running its ops takes: beside the state below it, and with it."""
    first: list[int] = []
    run: list[int] = []
    below = 0
    for step in path.steps:
        alone = whole = 0
        for index, b in enumerate(step):
            takes = _during(program, program.buffers[b].producer or 0)
            alone = max(alone, takes + (below if index else 0))
            whole = max(whole, takes + below)
            below = program.buffers[b].bytes
        first.append(alone)
        run.append(whole)
    return first, run


def _during(program: Program, op: int) -> int:
    """Bytes that one run of an op takes beside what it reads."""
    return program.ops[op].workspace_bytes + sum(program.buffers[b].bytes for b in program.ops[op].outputs)


def _others(program: Program, path: Path, lives: _Lives) -> Ints:
    """Per op, bytes of what is held through its stage or read by it, states of the path left out."""
    end = len(program.ops)
    change = np.zeros(end + 2, np.int64)
    read = np.zeros(end + 1, np.int64)
    on_path = set(path.states)
    for b, buffer in enumerate(program.buffers):
        if buffer.producer is None or b in on_path:
            continue
        if lives.droppable[b]:
            for r in program.readers[b]:
                read[r] += buffer.bytes
            continue
        last = end if b in program.pinned else int(lives.last[b])
        last = program.boundary - 1 if b in program.mutations else last
        change[buffer.producer + 1] += buffer.bytes
        change[max(last, buffer.producer) + 1] -= buffer.bytes
    change[program.boundary] += program.late_bytes
    return change.cumsum()[: end + 1] + read


def _residents(program: Program, path: Path, lives: _Lives, table: PathTable) -> Residents:
    """Buffers to be held, per stage. What a step's reversal is to hold is made where it is asked for, not before."""
    while_reversing: list[list[int]] = [[] for _ in path.steps]
    top = len(path.steps) - 1
    for step, highest in table.held():
        for each in while_reversing[step : highest + (highest == top)]:
            each.append(path.steps[step][-1])
    reversed_at = _reversed_at(path, len(program.ops))

    def residents(t: int) -> list[int]:
        alive = (lives.born < t) & (t <= lives.last)
        held = alive & ((lives.again < t) | (t <= lives.dropped) | ~lives.droppable)
        return [*np.flatnonzero(held).tolist(), *while_reversing[reversed_at[t]]]

    return residents


def _reversed_at(path: Path, stages: int) -> list[int]:
    """Per stage, the step that is reversed in it: the highest that is not yet asked for."""
    found: list[int] = []
    step = len(path.steps) - 1
    for t in range(stages):
        while step > 0 and path.asked_by[step] < t:
            step -= 1
        found.append(step)
    return found

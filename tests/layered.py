"""Layered steps with links: small enough that what a published planner moves can be told beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.planners.base import Answer, Problem
from ebbtide.step.legality import check
from ebbtide.step.machine import Link, Machine
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Compute, Free, Offload, Reload, Schedule
from ebbtide.step.simulate import simulate

__all__ = ["SIZE", "layered", "linked", "offloaded", "reloads", "reruns", "sound"]

SIZE = 100


def layered(count: int, *, sizes: Sequence[int] = (), seconds: Sequence[float] = ()) -> Program:
    """A chain: forward op ``i`` makes buffer ``i`` from ``i - 1``, which backward op ``2 * count - 1 - i`` reads.

    Each backward op reads the gradient before it, too, and makes one of one byte; ``seconds`` of the forward's ops.
    """
    sizes = sizes or (SIZE,) * count
    seconds = seconds or (1.0,) * count
    ops: list[Op] = []
    buffers: list[Buffer] = []
    for i in range(2 * count):
        forward, layer = i < count, i if i < count else 2 * count - 1 - i
        reads = {i - 1} if i else set[int]()
        if not forward:
            reads.add(layer)
        ops.append(Op(f"op{i}", "f" if forward else "g", tuple(sorted(reads)), (i,), seconds=seconds[layer]))
        buffers.append(Buffer(f"b{i}", sizes[layer] if forward else 1, i))
    return Program("layered", tuple(ops), tuple(buffers), count, (), (2 * count - 1,), ())


def linked(rate: float, *, capacity: int = 10**9, least: int = 0) -> Machine:
    """One whose link to the host moves ``rate`` results of :data:`SIZE` bytes per second each way."""
    link = Link("host", capacity, rate * SIZE, rate * SIZE, least_bytes=least)
    return Machine("toy", "cuda", 10**9, {"float32": 1.0}, 1.0, 0.0, 1, links={"host": link})


def offloaded(schedule: Schedule | None) -> set[int]:
    """Buffers that leave."""
    assert schedule is not None
    return {action.buffer for action in schedule.actions if isinstance(action, Offload)}


def reloads(schedule: Schedule | None) -> list[tuple[int, int]]:
    """Per reload its buffer, and the op that runs next."""
    assert schedule is not None
    found: list[tuple[int, int]] = []
    for index, action in enumerate(schedule.actions):
        if isinstance(action, Reload):
            later = (each.op for each in schedule.actions[index:] if isinstance(each, Compute))
            found.append((action.buffer, next(later)))
    return found


def reruns(schedule: Schedule | None) -> list[int]:
    """Ops that run again, in that order."""
    assert schedule is not None
    seen: set[int] = set()
    found: list[int] = []
    for action in schedule.actions:
        if isinstance(action, Compute):
            if action.op in seen:
                found.append(action.op)
            seen.add(action.op)
    return found


def freed_before(schedule: Schedule | None, buffer: int, op: int) -> bool:
    """Whether a buffer leaves the device before op ``op`` first runs."""
    assert schedule is not None
    for action in schedule.actions:
        if action == Compute(op):
            return False
        if action == Free(buffer):
            return True
    return False


def sound(problem: Problem, answer: Answer) -> Answer:
    """An answer, after it was held against legality and the budget."""
    if answer.schedule is not None:
        links = problem.links
        assert not check(problem.program, answer.schedule, problem.above_budget_bytes, links)
        above = simulate(problem.program, answer.schedule, problem.machine).above_bytes
        assert above <= problem.above_budget_bytes
    return answer

"""The optimum of a tiny program by exhaustive search: first runs in captured order, recomputation only.

Dijkstra over (next first run, boundary passed, resident buffers, generator states held). Actions: run the next op
(and hold its generator state or not), run an earlier op again, cross the boundary, and drop anything at no cost.
Written from the rules, knowing nothing of schedules, stages or intervals. In the *ascending* class reruns between
two first runs are in captured order, each op at most once: what Checkmate's stages and interval states can express.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ebbtide.step.program import Program

__all__ = ["optimal_overhead"]

Node = tuple[int, bool, frozenset[int], frozenset[int], int]  # the last: the op that ran last in this stage


def optimal_overhead(program: Program, above_budget_bytes: int, *, ascending: bool = False) -> float | None:
    """Least added time as a fraction of the unplanned step; ``None`` if no schedule fits."""
    start: Node = (0, False, frozenset(), frozenset(), -1)
    best: dict[Node, float] = {start: 0.0}
    queue: list[tuple[float, int, Node]] = [(0.0, 0, start)]
    ticket = 0
    while queue:
        seconds, _, node = heapq.heappop(queue)
        if seconds > best[node]:
            continue
        if node[0] == len(program.ops) and node[1]:
            return (seconds - program.seconds) / program.seconds
        for added, successor in _successors(program, above_budget_bytes, node, ascending):
            if seconds + added < best.get(successor, float("inf")) - 1e-12:
                best[successor] = seconds + added
                ticket += 1
                heapq.heappush(queue, (seconds + added, ticket, successor))
    return None


def _successors(program: Program, budget: int, node: Node, ascending: bool) -> Iterator[tuple[float, Node]]:
    position, passed, resident, states, last = node
    size = program.buffers
    live = sum(size[b].bytes for b in resident) + sum(program.ops[o].state_bytes for o in states)
    live += program.held_bytes if passed else 0
    kept = program.pinned if passed else program.pinned.union(program.mutations)
    for b in resident - kept:
        yield 0.0, (position, passed, resident - {b}, states, last)
    for o in states:
        yield 0.0, (position, passed, resident, states - {o}, last)
    if not passed and position == program.boundary and last == -1:
        after = resident.difference(program.mutations).union(program.tangents)
        appear = program.held_bytes + sum(size[b].bytes for b in program.tangents)
        gone = sum(size[b].bytes for b in program.mutations)
        if live - gone + max(appear, program.between_bytes) <= budget:
            yield 0.0, (position, True, after, states, -1)
    for index, op in enumerate(program.ops[: position + 1]):
        if not resident.issuperset(op.inputs):
            continue
        made = op.outputs if index == position else op.outputs[: len(op.outputs) - op.once]
        during = live + op.workspace_bytes + sum(size[b].bytes for b in made)
        after = resident.union(made)
        if index == position:
            if (position >= program.boundary) != passed:
                continue
            if during <= budget:
                yield op.seconds, (position + 1, passed, after, states, -1)
            if op.random and op.rerunnable and during + op.state_bytes <= budget:
                yield op.seconds, (position + 1, passed, after, states | {index}, -1)
        elif op.rerunnable and not (op.reads_mutated and passed) and not (ascending and index <= last):
            if op.random and index not in states:
                continue
            if during + op.state_bytes <= budget:
                yield op.seconds, (position, passed, after, states, index if ascending else -1)

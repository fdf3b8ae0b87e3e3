"""The optimum of a tiny program that may recompute and move, by exhaustive search: first runs in captured order.

A* over what is resident, copied, under way and held, with the time at which each lane and each transfer under way is
done. Of two ways to the same place the one that is nowhere later suffices (*dominance*), as nothing that follows begins
earlier for being asked later. Actions: run the next op (and hold its generator state or not), run an earlier op again,
cross the boundary, offload, reload; nothing is dropped but to make room for one of these, and no more than it takes:
whoever drops less can do the same later. Written from the rules, knowing nothing of stages, cuts or planners.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from ebbtide.step.machine import Link
from ebbtide.step.program import Program
from ebbtide.step.schedule import Action, Boundary, Compute, Free, Offload, Reload, Schedule

__all__ = ["TooManyStates", "optimal_with_moves"]


class TooManyStates(Exception):
    """The search was given up."""


class Place(NamedTuple):
    """All but times."""

    position: int  # the next first run
    passed: bool  # whether the boundary is
    resident: frozenset[int]
    states: frozenset[int]  # random ops whose generator state is held
    copies: frozenset[tuple[int, str]]
    leaving: tuple[int, ...]  # offloaded and not freed since
    unread: tuple[int, ...]  # reloaded and not read since


@dataclass(frozen=True, slots=True)
class Node:
    """A place with times: now, when each lane is free, when each of ``leaving`` is copied, of ``unread`` is there."""

    place: Place
    times: tuple[float, ...]
    before: Node | None = None
    actions: tuple[Action, ...] = ()


def optimal_with_moves(
    program: Program,
    budget: int,
    links: Mapping[str, Link],
    *,
    most: float = float("inf"),
    most_nodes: int = 200_000,
) -> tuple[float, Schedule] | None:
    """The least overhead and a schedule that has it; ``None`` if no schedule fits or is faster than ``most``.

    Raises:
        TooManyStates: after ``most_nodes`` nodes.
    """
    return _Search(program, budget, links).run(most, most_nodes)


class _Search:
    def __init__(self, program: Program, budget: int, links: Mapping[str, Link]) -> None:
        self.program, self.budget, self.links = program, budget, links
        self.lanes = sorted({link.lane(way) for link in links.values() for way in ("out", "in")})
        self.rest = [0.0] * (len(program.ops) + 1)
        for index in range(len(program.ops) - 1, -1, -1):
            self.rest[index] = self.rest[index + 1] + program.ops[index].seconds
        self.useful = [self._useful(position) for position in range(len(program.ops) + 1)]

    def _useful(self, position: int) -> frozenset[int]:
        """Buffers that somebody may still read."""
        found: set[int] = set()
        asked = [b for op in self.program.ops[position:] for b in op.inputs]
        while asked:
            b = asked.pop()
            if b not in found:
                found.add(b)
                producer = self.program.buffers[b].producer
                if producer is not None:
                    asked.extend(self.program.ops[producer].inputs)
        return frozenset(found)

    def run(self, most: float, most_nodes: int) -> tuple[float, Schedule] | None:
        start = Place(0, False, frozenset(), frozenset(), frozenset(), (), ())
        first = Node(start, (0.0,) * (1 + len(self.lanes)))
        known: dict[Place, list[tuple[float, ...]]] = {start: [first.times]}
        queue: list[tuple[float, int, Node]] = [(self.rest[0], 0, first)]
        limit = self.program.seconds * (1.0 + most) + 1e-12
        tickets = 0
        while queue:
            least, _, node = heapq.heappop(queue)
            if node.times not in known[node.place]:
                continue  # dominated since
            place = node.place
            if place.position == len(self.program.ops) and place.passed and not place.unread:
                seconds = self.program.seconds
                return (least / seconds - 1.0 if seconds else 0.0), _schedule(node)
            for following in self._following(node):
                end = self._least(following)
                if end <= limit and _is_new(known.setdefault(following.place, []), following.times):
                    tickets += 1
                    if tickets > most_nodes:
                        raise TooManyStates
                    heapq.heappush(queue, (end, tickets, following))
        return None

    def _least(self, node: Node) -> float:
        """No continuation ends earlier."""
        return max(node.times[0] + self.rest[node.place.position], *node.times[: 1 + len(self.lanes)])

    def _following(self, node: Node) -> Iterator[Node]:
        place = node.place
        program, passed = self.program, place.passed
        if not passed and place.position == program.boundary:
            yield from self._cross(node)
        for index, op in enumerate(program.ops[: place.position + 1]):
            if not place.resident.issuperset(op.inputs):
                continue
            if index == place.position:
                if (index >= program.boundary) == passed:
                    yield from self._compute(node, index, keep_state=False)
                    if op.random and op.rerunnable:
                        yield from self._compute(node, index, keep_state=True)
            elif op.rerunnable and not (op.reads_mutated and passed) and not (op.random and index not in place.states):
                made = program.made_by_rerun(index)
                if any(b in self.useful[place.position] and b not in place.resident for b in made):
                    yield from self._compute(node, index, keep_state=True)
        yield from self._moves(node)

    def _moves(self, node: Node) -> Iterator[Node]:
        place, size = node.place, self.program.buffers
        copied = dict(place.copies)
        for b in place.resident.intersection(self.program.movable, self.useful[place.position]):
            for tier, link in self.links.items():
                held = sum(link.round_up(size[c].bytes) for c, to in place.copies if to == tier)
                if b in copied or size[b].bytes < link.least_bytes:
                    continue
                if held + link.round_up(size[b].bytes) <= link.capacity_bytes:
                    times = _Times(self, node)
                    times.leaving[b] = times.transfer(b, link, "out")
                    where = place._replace(copies=place.copies | {(b, tier)})
                    yield times.node(where, Offload(b, tier))
        for b, tier in place.copies:
            if b not in place.resident and b in self.useful[place.position]:
                for after, times in self._with_room(node, size[b].bytes, frozenset()):
                    times.unread[b] = times.transfer(b, self.links[tier], "in")
                    yield times.node(after._replace(resident=after.resident | {b}), Reload(b))

    def _compute(self, node: Node, index: int, *, keep_state: bool) -> Iterator[Node]:
        program, op = self.program, self.program.ops[index]
        first = index == node.place.position
        made = op.outputs if first else program.made_by_rerun(index)
        room = op.workspace_bytes + sum(program.buffers[b].bytes for b in made)
        room += op.state_bytes if keep_state and op.random else 0
        for place, times in self._with_room(node, room, frozenset(op.inputs), None if first else index):
            times.now = max(times.now, *(times.unread.pop(b, 0.0) for b in op.inputs), 0.0) + op.seconds
            states = place.states | {index} if keep_state and op.random else place.states
            resident = place.resident.union(made)
            where = place._replace(position=place.position + first, resident=resident, states=states)
            yield times.node(where, Compute(index))

    def _cross(self, node: Node) -> Iterator[Node]:
        program, size = self.program, self.program.buffers
        appear = max(program.held_bytes + sum(size[b].bytes for b in program.tangents), program.between_bytes)
        gone = sum(size[b].bytes for b in program.mutations)
        if not node.place.resident.issuperset(program.forward_outputs + program.mutations):
            return
        for place, times in self._with_room(node, appear - gone, frozenset()):
            times.now = max([times.now, *times.unread.values()])
            resident = place.resident.difference(program.mutations).union(program.tangents)
            yield times.node(place._replace(passed=True, resident=resident), Boundary())

    def _with_room(
        self, node: Node, room: int, reads: frozenset[int], state: int | None = None
    ) -> Iterator[tuple[Place, _Times]]:
        """The node after dropping no more than makes room for so many bytes, in each way there is."""
        place, program = node.place, self.program
        live = sum(program.buffers[b].bytes for b in place.resident)
        live += sum(program.ops[o].state_bytes for o in place.states)
        over = live + room + (program.held_bytes if place.passed else 0) - self.budget
        stays = program.pinned.union(reads, place.unread, () if place.passed else program.mutations)
        items = [(program.buffers[b].bytes, "buffer", b) for b in sorted(place.resident - stays)]
        items += [(program.ops[o].state_bytes, "state", o) for o in sorted(place.states) if o != state]
        for dropped in _least_subsets([item for item in items if item[0]], over):
            buffers = [what for _, kind, what in dropped if kind == "buffer"]
            times = _Times(self, node)
            for b in buffers:
                times.now = max(times.now, times.leaving.pop(b, 0.0))
                times.actions.append(Free(b))
            states = place.states.difference(what for _, kind, what in dropped if kind == "state")
            yield place._replace(resident=place.resident.difference(buffers), states=states), times


class _Times:
    """The times of a node, to be changed."""

    def __init__(self, search: _Search, node: Node) -> None:
        lanes = len(search.lanes)
        place = node.place
        self._search, self._before = search, node
        self.now = node.times[0]
        self.lane = dict(zip(search.lanes, node.times[1 : 1 + lanes], strict=True))
        self.leaving = dict(zip(place.leaving, node.times[1 + lanes :], strict=False))
        self.unread = dict(zip(place.unread, node.times[1 + lanes + len(place.leaving) :], strict=True))
        self.actions: list[Action] = []

    def transfer(self, b: int, link: Link, way: str) -> float:
        """Issue one; when it ends."""
        name = link.lane("out" if way == "out" else "in")
        seconds = link.seconds(self._search.program.buffers[b].bytes, "out" if way == "out" else "in")
        self.lane[name] = max(self.lane[name], self.now) + seconds
        self.now += seconds * link.compute_share
        return self.lane[name]

    def node(self, place: Place, action: Action) -> Node:
        leaving, unread = sorted(self.leaving), sorted(self.unread)
        ends = [*self.lane.values(), *(self.leaving[b] for b in leaving), *(self.unread[b] for b in unread)]
        place = place._replace(leaving=tuple(leaving), unread=tuple(unread))
        times = (self.now, *(max(end, self.now) for end in ends))
        return Node(place, times, self._before, (*self.actions, action))


def _least_subsets(items: list[tuple[int, str, int]], over: int) -> Iterator[tuple[tuple[int, str, int], ...]]:
    """Subsets of at least ``over`` bytes of which no part is enough."""
    if over <= 0:
        yield ()
        return
    for count in range(1, len(items) + 1):
        for subset in combinations(items, count):
            total = sum(size for size, _, _ in subset)
            if total >= over and total - min(size for size, _, _ in subset) < over:
                yield subset


def _is_new(known: list[tuple[float, ...]], times: tuple[float, ...]) -> bool:
    """Whether none of ``known`` is nowhere later; those that ``times`` dominates go."""
    for each in known:
        if all(a <= b + 1e-12 for a, b in zip(each, times, strict=True)):
            return False
    known[:] = [each for each in known if not all(b <= a for a, b in zip(each, times, strict=True))]
    known.append(times)
    return True


def _schedule(node: Node) -> Schedule:
    actions: list[Action] = []
    at: Node | None = node
    while at is not None:
        actions.extend(reversed(at.actions))
        at = at.before
    return Schedule(tuple(reversed(actions)))

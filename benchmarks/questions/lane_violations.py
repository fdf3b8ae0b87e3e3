"""Legal schedules with moves against the bound with lanes at their own peak: none may be below it.

Programs are chains, branches with random and single-run ops, and chains with batch norms and dropouts. Half of a
program's schedules are random walks, half are changed at random from what the relaxation itself found at some budget,
so that they come near the bound. For fixed cuts the bound falls as the budget grows: where that at the least peak of
some schedules is not above the least of their overheads, none of them can be below its own. So few are solved for.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ebbtide.planners import Interrupt
from ebbtide.planners.hybrid.bounds import lane_bounds
from ebbtide.planners.hybrid.choice import Choice, schedule_of
from ebbtide.planners.hybrid.cut_lanes import LaneModel
from ebbtide.planners.hybrid.floor import floor_with_tiers, tiers_of
from ebbtide.planners.hybrid.rounding import looked_at
from ebbtide.planners.search.orders import CapturedOrder
from ebbtide.step.legality import check
from ebbtide.step.machine import Link, Machine
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate
from harness.graphs import unplanned_bytes
from harness.record import Row, at_least, at_most
from questions import reach
from questions.oracle import drawn

TITLE = "Random legal schedules with moves below the bound with lanes"
PROGRAMS, BATCH, SCHEDULES = 255, 15, 400
CASES = tuple(f"{first}-{first + BATCH - 1}" for first in range(0, PROGRAMS, BATCH))
QUICK = CASES[:1]
TOLERANCE = 1e-8
NEAR = 0.02  # of the unplanned step: a schedule this near its bound would show a bound that is a little too high
WORK = 30_000  # of the solver for one program and budget
FEW = 12  # ops of a program; others have up to twice as many

Found = tuple[int, float]  # peak and overhead of a schedule


def batch_norms(seed: int) -> Program:
    """Convolution, batch norm with new running values, and dropout, several times; then their backward."""
    rng = random.Random(seed)
    buffers: list[Buffer] = []
    ops: list[Op] = []
    mutations: list[int] = []

    def op(inputs: list[int], sizes: list[int], state: int = 0, *, normalises: bool = False) -> int:
        made = tuple(range(len(buffers), len(buffers) + len(sizes)))
        buffers.extend(Buffer(f"b{b}", size, len(ops)) for b, size in zip(made, sizes, strict=True))
        seconds = rng.randint(1, 5) * 1e-3
        again = {"repeat": "again", "once": 1} if normalises else {}
        ops.append(
            Op(f"op{len(ops)}", "test", tuple(sorted(inputs)), made, seconds=seconds, state_bytes=state, **again)
        )
        mutations.extend(made[-1:] if normalises else ())
        return made[0]

    last: list[int] = []
    layers: list[tuple[list[int], int, int, int]] = []
    for _ in range(rng.randint(1, 5)):
        convolved = op(last, [rng.randint(4, 9)])
        normal = op([convolved], [rng.randint(4, 9), 1, 1], normalises=True)
        dropped = op([normal], [rng.randint(4, 9), 2], 2) if rng.random() < 0.5 else op([normal], [rng.randint(4, 9)])
        layers.append((last, convolved, normal, dropped))
        last = [dropped]
    boundary = len(ops)
    flow = op(last, [8])
    gradients: list[int] = []
    for below, convolved, normal, _ in reversed(layers):
        flow = op([flow, normal], [rng.randint(4, 9)])
        flow = op([flow, convolved, normal + 1], [rng.randint(4, 9)])
        gradients.append(op([flow, *below], [1]))
    return Program("batch norms", tuple(ops), tuple(buffers), boundary, (), (*gradients, flow), tuple(mutations))


def program_of(seed: int) -> Program:
    """By turns a chain, a program with branches, and one with batch norms."""
    rng = random.Random(seed)
    if seed % 3 == 0:
        program = reach.chain(rng.randint(2, 12), seed)
    elif seed % 3 == 1:
        program = drawn(seed, least=4, most=rng.choice((FEW, 24)))
    else:
        program = batch_norms(seed)
    if rng.random() < 0.3:  # some storages cannot leave
        program = replace(program, buffers=tuple(replace(b, whole=rng.random() < 0.7) for b in program.buffers))
    return program


def links_of(program: Program, rng: random.Random) -> dict[str, Link]:
    """Links on which a usual buffer takes about as long as a usual op, or much less, or more."""
    from random_moves import random_links  # tests/ is on the path of a benchmark's children

    seconds = rng.choice((0.3, 1.0, 3.0)) * program.seconds / len(program.ops)
    size = sum(b.bytes for b in program.buffers) // len(program.buffers) or 1
    links = random_links(rng, seconds=seconds, size=size)
    held = sum(b.bytes for b in program.buffers)
    return {
        tier: replace(link, capacity_bytes=rng.choice((held, held, held // 3)), least_bytes=rng.choice((0, 0, size)))
        for tier, link in links.items()
    }


def schedules_of(program: Program, links: Mapping[str, Link], rng: random.Random, count: int) -> Iterator[Schedule]:
    """``count`` legal schedules."""
    from random_moves import random_moves

    starts = [*_near(program, links, rng)] or [Choice()]
    for number in range(count):
        if number % 2:
            changed = schedule_of(program, _changed(program, links, rng.choice(starts), rng))
            if not check(program, changed, None, links):
                yield changed
                continue
        yield random_moves(program, links, rng.randrange(10**9))


def _near(program: Program, links: Mapping[str, Link], rng: random.Random) -> Iterator[Choice]:
    """What the relaxation finds at some budgets."""
    floor, peak = floor_with_tiers(program, links)[0], unplanned_bytes(program)
    for _ in range(2):
        for found in lane_bounds(program, int(floor + rng.random() * (peak - floor)), links, Interrupt(), work=WORK):
            if found.choice is not None:
                yield found.choice


def _changed(program: Program, links: Mapping[str, Link], choice: Choice, rng: random.Random) -> Choice:
    """A choice near ``choice``, or itself."""
    share = rng.choice((0.0, 0.05, 0.2, 0.5))
    stages = len(program.ops)

    def some(pairs: frozenset[tuple[int, int]], first: Callable[[int], int]) -> set[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for what, stage in pairs:
            luck = rng.random()
            if luck < share / 2:
                continue
            found.add((what, rng.randint(first(what), stage) if luck < share and first(what) <= stage else stage))
        return found

    after = [(buffer.producer or 0) + 1 for buffer in program.buffers]
    loads, tiers = some(choice.loads, after.__getitem__), dict(choice.tiers)
    reruns = some(choice.reruns, lambda op: op + 1)
    for b in program.movable:
        takes = tiers_of(program, b, links)
        if takes and rng.random() < share / 4 and after[b] < stages:
            loads.add((b, rng.randrange(after[b], stages)))
            tiers.setdefault(b, rng.choice(takes))
    holds = some(choice.holds, after.__getitem__)
    return Choice(frozenset(reruns), frozenset(loads), frozenset(holds), {b: tiers[b] for b, _ in loads})


def rows(case: str, quick: bool) -> Iterator[Row]:
    first, last = (int(part) for part in case.split("-"))
    count: Counter[str] = Counter()
    worst = -math.inf
    for seed in range(first, first + 5 if quick else last + 1):
        rng = random.Random(seed)
        program = program_of(seed)
        links = links_of(program, rng)
        machine = Machine("any", "cpu", 0, {}, 1.0, 0.0, 1, links)
        found: list[Found] = []
        for schedule in schedules_of(program, links, rng, SCHEDULES):
            timeline = simulate(program, schedule, machine)
            found.append((timeline.above_bytes, timeline.seconds / program.seconds - 1.0))
            count["with_moves"] += schedule.moves
        count["schedules"] += len(found)
        found.sort()
        for ask in _bounds(program, links, rng):
            worst = max(worst, _held(ask, found, count))
        for peak, _ in rng.sample(found[: len(found) // 3], 2):
            bound = 0.0
            for each in lane_bounds(program, peak, links, Interrupt(), work=WORK):
                bound = math.inf if each.infeasible else each.bound
            for other, overhead in found:
                if other <= peak:
                    count["violations"] += bound > overhead + TOLERANCE
                    count["near"] += overhead < bound + NEAR and bound > 0.0
                    worst = max(worst, bound - overhead)
    yield Row(
        "lane_violations",
        {
            "case": f"programs {case}",
            "schedules": count["schedules"],
            "with_moves": count["with_moves"],
            "solved": count["solved"],
            "pairs_near_the_bound": count["near"],
            "violations": count["violations"],
            "most_above": worst,
        },
        (at_most("violations", count["violations"], 0), at_least("near", count["near"], 1)),
    )


def _bounds(program: Program, links: Mapping[str, Link], rng: random.Random) -> Iterator[Callable[[int], float]]:
    """The bound as a function of the budget, for cuts at random, the fullest stage often among them."""
    fullest = int(looked_at(program, Choice(), links)[0].argmax())
    for _ in range(2):
        cuts = set(rng.sample(range(len(program.ops)), rng.randint(1, min(4, len(program.ops)))))
        cuts = sorted(cuts | {fullest} if rng.random() < 0.8 else cuts)
        merged, whole = rng.random() < 0.5, rng.random() < 0.5

        def bound(budget: int, cuts: list[int] = cuts, merged: bool = merged, whole: bool = whole) -> float:
            model = LaneModel(program, budget, cuts, CapturedOrder(program), links)
            if merged:
                model.merge()
            solved = model.solve(Interrupt(), 10**7, math.inf, whole=whole)
            return math.inf if solved.infeasible else solved.bound

        yield bound


def _held(bound: Callable[[int], float], found: Sequence[Found], count: Counter[str]) -> float:
    """Hold schedules, ascending by peak, against their bounds; by how much one is above at most."""
    if not found:
        return -math.inf
    count["solved"] += 1
    least = min(overhead for _, overhead in found)
    above = bound(found[0][0]) - least
    if above <= TOLERANCE:
        return above
    if all(peak == found[0][0] for peak, _ in found):
        count["violations"] += 1
        return above
    middle = found[len(found) // 2][0]
    if middle == found[0][0]:
        middle = next(peak for peak, _ in found if peak > middle)
    lower, upper = [each for each in found if each[0] < middle], [each for each in found if each[0] >= middle]
    return max(_held(bound, lower, count), _held(bound, upper, count))

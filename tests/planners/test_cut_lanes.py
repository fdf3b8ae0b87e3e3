"""The cut relaxation with lanes: below every legal schedule with moves, near the exact optimum, equal without links."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ebbtide.planners import Interrupt
from ebbtide.planners.bounds.cut_bound import CutModel
from ebbtide.planners.hybrid.bounds import LaneBound, lane_bounds
from ebbtide.planners.hybrid.choice import Choice, schedule_of
from ebbtide.planners.hybrid.cut_lanes import GAP, PRICE, LaneModel
from ebbtide.planners.hybrid.floor import floor_with_tiers
from ebbtide.planners.hybrid.rounding import looked_at
from ebbtide.planners.search.orders import CapturedOrder
from ebbtide.step.legality import check
from ebbtide.step.machine import Link, Machine
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Boundary, Compute, Hold, Offload, Reload, Schedule
from ebbtide.step.simulate import overhead_of, simulate
from ebbtide.step.unplanned import unplanned_bytes
from oracle.brute_force import optimal_overhead
from oracle.chains import mlp_chain, random_chain
from oracle.with_moves import TooManyStates, optimal_with_moves
from random_moves import random_links, random_moves
from strategies import chain, examples, programs

ROOM = 10**6
TOLERANCE = 1e-8
LOST = (GAP + PRICE) / 100 + 1e-7  # of the bound, to what the solver may leave open


def machine(links: Mapping[str, Link]) -> Machine:
    return Machine("test", "cpu", 0, {"float32": 1.0}, 1.0, 0.0, 1, dict(links))


def host(rate: float, **others: object) -> dict[str, Link]:
    return {"host": replace(Link("host", ROOM, rate, rate), **others)}


def solved(
    program: Program,
    budget: int,
    cuts: list[int],
    links: Mapping[str, Link],
    *,
    whole: bool = True,
    merge: bool = False,
) -> tuple[float, bool]:
    model = LaneModel(program, budget, cuts, CapturedOrder(program), links)
    if merge:
        model.merge()
    answer = model.solve(Interrupt(), 10**9, math.inf, whole=whole)
    return answer.bound, answer.infeasible


def last_of(program: Program, budget: int, links: Mapping[str, Link]) -> LaneBound:
    found = LaneBound(0.0, False, Choice())
    for each in lane_bounds(program, budget, links, Interrupt()):
        assert each.bound >= found.bound
        found = each
    return found


def holds_for(program: Program, schedule: Schedule, links: Mapping[str, Link], rng: random.Random) -> None:
    """The bound of the schedule's own peak, at cuts drawn at random, is not above its overhead."""
    assert not check(program, schedule, None, links)
    peak = simulate(program, schedule, machine(links)).above_bytes
    overhead = overhead_of(program, schedule, machine(links))
    count = len(program.ops)
    fullest = int(looked_at(program, Choice(), links)[0].argmax())
    cuts = {fullest, *rng.sample(range(count), rng.randint(0, min(3, count)))}
    bound, infeasible = solved(program, peak, sorted(cuts), links, whole=rng.random() < 0.5, merge=rng.random() < 0.5)
    assert not infeasible
    assert bound <= overhead + TOLERANCE
    assert floor_with_tiers(program, links)[0] <= peak


@settings(max_examples=examples(100))
@given(program=programs(max_ops=14), seed=st.integers(0, 10**6))
def test_no_random_schedule_is_below_the_bound(program: Program, seed: int) -> None:
    rng = random.Random(seed)
    links = random_links(rng)
    holds_for(program, random_moves(program, links, seed), links, rng)


@settings(max_examples=examples(30))
@given(seed=st.integers(0, 10**6))
def test_no_schedule_that_the_relaxation_finds_is_below_it(seed: int) -> None:
    rng = random.Random(seed)
    program = chain(rng.randint(2, 6)) if rng.random() < 0.5 else random_chain(seed, 6)
    links = random_links(rng, seconds=rng.choice((0.3, 1.0, 3.0)) * program.seconds / len(program.ops), size=4)
    floor, peak = floor_with_tiers(program, links)[0], unplanned_bytes(program)
    found = last_of(program, int(floor + rng.random() * (peak - floor)), links)
    assume(found.choice is not None)
    assert found.choice is not None
    holds_for(program, schedule_of(program, found.choice), links, rng)


@pytest.mark.parametrize("seed", range(examples(40)))
def test_the_bound_is_near_the_exact_optimum_and_never_above(seed: int) -> None:
    rng = random.Random(seed)
    program = random_chain(seed, 3) if seed % 2 else chain(2)
    if seed % 3 == 0:
        drawn = tuple(replace(op, state_bytes=rng.choice((0, 0, 1))) for op in program.ops)
        program = replace(program, ops=drawn)
    seconds = rng.choice((0.3, 1.0)) * program.seconds / len(program.ops)
    links = random_links(rng, seconds=seconds, size=2 if seed % 2 else 8)
    floor, peak = floor_with_tiers(program, links)[0], unplanned_bytes(program)
    if len(program.ops) > 11 or peak == floor:
        return
    budget = int(floor + rng.random() * (peak - floor))
    try:
        exact = optimal_with_moves(program, budget, links, most_nodes=8_000)
    except TooManyStates:
        return
    by_reruns = optimal_overhead(program, budget)
    found = last_of(program, budget, links)
    if exact is None:
        assert by_reruns is None
        return
    overhead, schedule = exact
    assert not check(program, schedule, budget, links)
    assert overhead == pytest.approx(overhead_of(program, schedule, machine(links)), abs=1e-9)
    assert by_reruns is None or overhead <= by_reruns + 1e-9
    assert not found.infeasible
    assert found.bound <= overhead + TOLERANCE
    for number in range(30):
        other = random_moves(program, links, 1000 * seed + number)
        if simulate(program, other, machine(links)).above_bytes <= budget:
            assert overhead_of(program, other, machine(links)) >= overhead - 1e-9


@settings(max_examples=examples(50))
@given(program=programs(max_ops=6, max_tangents=1), seed=st.integers(0, 10**6))
def test_no_exact_optimum_of_a_random_program_is_below_the_bound(program: Program, seed: int) -> None:
    rng = random.Random(seed)
    links = random_links(rng)
    floor, peak = floor_with_tiers(program, links)[0], unplanned_bytes(program)
    budget = int(floor + rng.random() * (peak - floor))
    try:
        exact = optimal_with_moves(program, budget, links, most_nodes=2_000)
    except TooManyStates:
        return
    found = last_of(program, budget, links)
    if exact is None:
        assert optimal_overhead(program, budget) is None
    else:
        assert not found.infeasible
        assert found.bound <= exact[0] + TOLERANCE


@settings(max_examples=examples(50))
@given(program=programs(max_ops=16), share=st.floats(0.3, 0.95), data=st.data())
def test_without_links_the_bound_is_that_of_reruns_alone(program: Program, share: float, data: st.DataObject) -> None:
    budget = int(share * unplanned_bytes(program))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(program.ops) - 1), min_size=1, max_size=3)))
    answer = CutModel(program, budget, cuts, CapturedOrder(program)).solve(Interrupt(), 10**9, math.inf)
    alone = solved(program, budget, cuts, {})
    assert alone == (answer.bound, answer.infeasible)
    with_links, infeasible = solved(program, budget, cuts, host(10**3))
    assert infeasible <= alone[1]
    assert alone[1] or with_links <= alone[0] + TOLERANCE


def test_a_fast_link_makes_moves_free_and_the_price_is_no_part_of_the_bound() -> None:
    program = mlp_chain(6)
    floor, peak = floor_with_tiers(program)[0], unplanned_bytes(program)
    found = last_of(program, (floor + peak) // 2, host(8 / 0.9))
    assert found.bound == 0.0
    assert found.choice is not None
    assert found.choice.loads
    assert not found.choice.reruns
    taken, overhead = looked_at(program, found.choice, host(8 / 0.9))
    assert (overhead, taken.max() <= (floor + peak) // 2) == (0.0, True)


def test_a_slower_link_costs_more_until_moving_pays_nowhere() -> None:
    program = mlp_chain(6)
    budget = (floor_with_tiers(program)[0] + unplanned_bytes(program)) // 2
    slow = [last_of(program, budget, host(8 / seconds)).bound for seconds in (0.5, 2.0, 4.0, 8.0, 1000.0)]
    assert slow == sorted(slow)
    assert slow[0] == 0.0
    assert slow[1] < slow[-1]
    assert slow[-1] == pytest.approx(last_of(program, budget, {}).bound, abs=LOST)


@pytest.mark.parametrize(
    "worse",
    [{"compute_share": 0.3}, {"latency_seconds": 2.0}, {"capacity_bytes": 16}, {"least_bytes": 9}],
    ids=str,
)
def test_whatever_a_link_lacks_shows_in_the_bound(worse: dict[str, object]) -> None:
    program = mlp_chain(6)
    floor, peak = floor_with_tiers(program)[0], unplanned_bytes(program)
    budget = int(floor + 0.3 * (peak - floor))
    best = last_of(program, budget, host(8 / 2.5)).bound
    assert last_of(program, budget, host(8 / 2.5, **worse)).bound > best + LOST


def test_two_tiers_are_two_lanes() -> None:
    program = mlp_chain(6)
    floor, peak = floor_with_tiers(program)[0], unplanned_bytes(program)
    budget = int(floor + 0.3 * (peak - floor))
    link = host(8 / 4.0)["host"]
    one, both = {"host": link}, {"host": link, "disk": replace(link, tier="disk")}
    assert last_of(program, budget, both).bound < last_of(program, budget, one).bound - LOST


def single_runs(*ops: tuple[tuple[int, ...], int]) -> Program:
    """Ops of a second each that may not run again, by the ops they read and the size of what they make."""
    made = tuple(Buffer(str(index), size, index) for index, (_, size) in enumerate(ops))
    run = tuple(
        Op(str(index), "test", inputs, (index,), seconds=1.0, rerunnable=False) for index, (inputs, _) in enumerate(ops)
    )
    return Program("single runs", run, made, len(ops), gradients=(len(ops) - 1,))


IDLE = ((), 0)
FULL = ((), 20)


def test_a_load_may_be_under_way_at_the_next_cut() -> None:
    """It is read after the second cut, which then counts it as kept: it has until then, not until the second cut."""
    program = single_runs(((), 4), IDLE, IDLE, FULL, ((), 5), IDLE, IDLE, ((0,), 1))
    links = host(4 / 2.0)
    steps: list[Compute | Boundary | Offload | Reload | Hold] = [Compute(index) for index in range(8)]
    steps[4:4] = [Reload(0)]
    steps[3:3] = [Hold(0)]
    steps[1:1] = [Offload(0, "host")]
    schedule = Schedule.from_steps(program, [*steps, Boundary()])
    assert not check(program, schedule, 20, links)
    assert overhead_of(program, schedule, machine(links)) == 0.0
    assert solved(program, 20, [3, 4], links) == (0.0, False)
    assert solved(program, 20, [3, 5], links) == (0.0, False)


def test_a_copy_may_be_under_way_at_a_cut() -> None:
    """It is issued before the first cut, where its buffer is kept, and there before the second, where it is not."""
    program = single_runs(((), 4), IDLE, ((), 5), IDLE, IDLE, FULL, IDLE, IDLE, IDLE, IDLE, ((0,), 1))
    assert solved(program, 20, [2, 5], host(4 / 4.0)) == (0.0, False)
    exact = optimal_with_moves(program, 20, host(4 / 4.0))
    assert exact is not None
    assert exact[0] == 0.0


def test_reruns_give_transfers_time() -> None:
    """One result comes back by a rerun of four seconds; meanwhile another does by a load of five."""
    program = single_runs(((), 4), ((), 4), IDLE, IDLE, IDLE, IDLE, IDLE, FULL, ((0,), 0), ((1,), 1))
    again = replace(program.ops[0], rerunnable=True, seconds=4.0)
    stays = replace(program.buffers[0], whole=False)
    program = replace(program, ops=(again, *program.ops[1:]), buffers=(stays, *program.buffers[1:]))
    exact = optimal_with_moves(program, 20, host(4 / 5.0))
    assert exact is not None
    assert exact[0] == pytest.approx(4 / 13)
    assert solved(program, 20, [7], host(4 / 5.0)) == (pytest.approx(4 / 13, abs=LOST), False)


def test_one_lane_for_both_ways_is_shared() -> None:
    """Between the two full stages one buffer comes back while another leaves, two seconds each in two ops' time."""
    program = single_runs(((), 4), IDLE, IDLE, FULL, ((), 4), ((0,), 0), FULL, IDLE, IDLE, ((4,), 0))
    two = solved(program, 20, [3, 6], host(4 / 2.0))
    one = solved(program, 20, [3, 6], host(4 / 2.0, duplex=False))
    assert two == (pytest.approx(1 / 10, abs=LOST), False)
    assert one == (pytest.approx(2 / 10, abs=LOST), False)
    exact = [optimal_with_moves(program, 20, host(4 / 2.0, duplex=duplex)) for duplex in (True, False)]
    assert [each and each[0] for each in exact] == [pytest.approx(1 / 10), pytest.approx(2 / 10)]


def test_what_cannot_fit_is_proven_infeasible() -> None:
    program = mlp_chain(3)
    assert last_of(program, floor_with_tiers(program)[0] - 1, host(1e6)).infeasible
    assert not last_of(program, floor_with_tiers(program)[0], host(1e6)).infeasible

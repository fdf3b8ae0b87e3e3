"""The default portfolio where buffers may be moved: keep, recompute or move, whatever the timeline says is cheapest.

Start points, each repaired to the budget by reruns and loads, tightened and cleaned up:
1. The best plan that only recomputes, found as without tiers: no plan is slower.
2. What the cut relaxation with lanes rounds to, cut by cut; its bound is the answer's.
3. The best plan that only moves (:func:`moves_alone`): no plan is slower than that one either.
4. The unplanned step, seeds, and where nothing fits yet the schedule of least memory.
5. Of large programs, which annealing gets through too few moves of: what the relaxation rounds to with slower lanes.
   Lanes that are not full leave room for what rounding shifts.

The best two are annealed, in rounds that end once the bound is near. All is judged by the makespan that the simulator
gives.
"""

from __future__ import annotations

from dataclasses import replace

from ebbtide.planners.base import DEFAULT_EFFORT, LARGE_OPS, Answer, Problem, Progress, Status, tiers_order
from ebbtide.planners.bounds.cut_bound import WORK
from ebbtide.planners.hybrid.bounds import lane_bounds
from ebbtide.planners.hybrid.choice import Choice, choice_of
from ebbtide.planners.hybrid.state import HybridState
from ebbtide.planners.search import local_search
from ebbtide.planners.search.greedy import HEAT, HOTTEST, PROVEN, assert_within
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import overhead_of

__all__ = ["hybrid", "moves_alone"]

RUNS_PER_MOVE = 500  # walked per unit of effort in each phase, as in search.greedy
MOST_TIMES = 8.0  # as much work, for repairing a start of a large program
FULL_EFFORT_OPS = 750  # as in auto
LANES = (0.5, 0.0)  # prices of a lane's time where a start is repaired
LANES_SHARE = 1  # of the solver's work is for the cut relaxation with lanes
ALONE, PROMISING = 64, 0.05  # share of the effort for moves alone, and overhead from which on it is not worth any
COLDEST = 2e-4  # as in search.greedy; here small exchanges between lanes and reruns are the last gains
ROUNDS, TURN = 7, 5  # of annealing at most; share of the effort for each
AGAIN, AHEAD = 3, 10  # every so many rounds the best is annealed; seeds of rounds begin there
FIRST = 20  # share of the effort for annealing what the linear relaxation rounds to: whole numbers may do better
SLOWER = (0.7, 0.5)  # shares of the lanes' rates for start 5
CLOSE = 1e-3  # the gap at which all but moving alone ends
NEAREST = 2e-4  # the gap to which temperatures lead


class _Incumbent:
    """The best choices found so far for one problem, over one state."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.state = HybridState(problem.program, problem.links)
        self.best: list[tuple[float, Choice]] = []  # ascending by overhead
        self.bound = 0.0
        self.rounded: Choice | None = None  # the best before any annealing

    @property
    def overhead(self) -> float:
        return self.best[0][0] if self.best else float("inf")

    def tell(self, stage: str) -> None:
        """Report progress."""
        self.problem.progress(Progress(stage, self.overhead if self.best else None, self.bound))

    def allow(self, times: float = 1.0) -> None:
        """Give the searches that follow their share of the effort, so many times over."""
        self.state.allow_work(round(times * self.problem.effort * RUNS_PER_MOVE))

    def offer(self) -> bool:
        """Keep the present state if it fits; whether it does."""
        if self.state.peak_bytes > self.problem.above_budget_bytes:
            return False
        choice = self.state.choice
        if all(choice != each for _, each in self.best):
            self.best.append((self.state.overhead, choice))
            self.best.sort(key=lambda each: each[0])
        return True

    def start_from(self, choice: Choice, *, moves_only: bool = False) -> None:
        """Repair a start point in each way there is.

        A larger program has more to evict, and each eviction is priced by walking it.
        """
        times = min(max(1.0, (len(self.problem.program.ops) / LARGE_OPS) ** 2), MOST_TIMES)
        budget, interrupt = self.problem.above_budget_bytes, self.problem.interrupt
        for lane in LANES:
            self.state.load_choice(choice)
            over = self.state.peak_bytes > budget
            self.allow(times)
            if over:
                local_search.repair(self.state, budget, interrupt, lane=lane, moves_only=moves_only)
            if self.state.peak_bytes <= budget:
                local_search.tighten(self.state, budget)
                self.offer()
                local_search.clean_up(self.state, budget)
                local_search.tighten(self.state, budget)
                self.offer()
            if not over or moves_only or interrupt:
                break

    def anneal(self, choice: Choice, moves: int, seed: int, *, moves_only: bool = False) -> None:
        """Anneal a choice that fits."""
        overhead, enough = self.overhead, self.bound + CLOSE
        self.state.load_choice(choice)
        if moves <= 0 or overhead <= enough or self.state.peak_bytes > self.problem.above_budget_bytes:
            return
        self.allow()
        hottest = max(HOTTEST, 1.0 / len(self.problem.program.ops))
        local_search.anneal(
            self.state,
            self.problem.above_budget_bytes,
            moves,
            seed,
            self.problem.interrupt,
            hot=min(max(HEAT * (self.state.overhead - self.bound - NEAREST), COLDEST), hottest),
            enough=enough,
            moves_only=moves_only,
        )
        local_search.tighten(self.state, self.problem.above_budget_bytes)
        self.offer()


def hybrid(problem: Problem, recompute: Answer) -> Answer:
    """The best plan that may move buffers.

    Args:
        problem: with tiers.
        recompute: what was found for it without them.
    """
    bound_class = tiers_order(tuple(problem.links))
    if recompute.schedule is not None and overhead_of(problem.program, recompute.schedule) <= PROVEN:
        return replace(recompute, bound_class=bound_class)
    found = _Incumbent(problem)
    effort = round(problem.effort * min(1.0, FULL_EFFORT_OPS / len(problem.program.ops)))
    infeasible = _start(found, recompute, effort)
    if len(problem.program.ops) >= LARGE_OPS:
        _start_slower(found)
    _anneal(found, effort)
    return _answer(found, recompute, bound_class, infeasible=infeasible, effort=effort)


def moves_alone(problem: Problem) -> Schedule | None:
    """The best plan found that runs every op once, and moves buffers to fit; ``None`` if none does."""
    found = _moves_alone(problem)
    if not found.best:
        return None
    found.state.load_choice(found.best[0][1])
    return found.state.to_schedule()


def _moves_alone(problem: Problem) -> _Incumbent:
    """Search among plans that only move, whatever else is known: no answer may be slower than these."""
    found = _Incumbent(problem)
    found.start_from(Choice(), moves_only=True)
    if found.overhead <= PROMISING:
        found.anneal(found.best[0][1], problem.effort // ALONE, problem.seed, moves_only=True)
    return found


def _start(incumbent: _Incumbent, recompute: Answer, effort: int) -> bool:
    """All start points; whether the budget is proven infeasible."""
    problem = incumbent.problem
    seeds = [] if recompute.schedule is None else [recompute.schedule]
    for schedule in (*seeds, *problem.seeds):
        if (choice := choice_of(problem.program, schedule)) is not None:
            incumbent.start_from(choice)
    infeasible = False
    incumbent.tell("cut relaxation with lanes")
    rounds = lane_bounds(
        problem.program,
        problem.above_budget_bytes,
        problem.links,
        problem.interrupt,
        work=WORK * problem.effort // (LANES_SHARE * DEFAULT_EFFORT),
        enough=lambda: incumbent.overhead - CLOSE,
    )
    for turn, each in enumerate(rounds):
        incumbent.bound, infeasible = max(incumbent.bound, each.bound), each.infeasible
        if each.choice is not None:
            incumbent.start_from(each.choice)
        if turn == 0 and incumbent.best:
            incumbent.rounded = incumbent.best[0][1]
        if (
            turn == 0 and incumbent.best and incumbent.overhead - incumbent.bound > CLOSE
        ):  # whole numbers take the solver long
            incumbent.anneal(incumbent.best[0][1], effort // FIRST, problem.seed)
        incumbent.tell("cut relaxation with lanes")
    if infeasible or problem.interrupt or incumbent.overhead <= incumbent.bound + PROVEN:
        return infeasible
    incumbent.tell("moving alone")
    incumbent.best = sorted([*incumbent.best, *_moves_alone(problem).best], key=lambda each: each[0])
    if incumbent.overhead - incumbent.bound > CLOSE:
        incumbent.tell("greedy")
        incumbent.start_from(Choice())
    if not incumbent.best and not problem.interrupt:
        incumbent.tell("looking for the smallest workable budget")
        smallest, schedule = smallest_of(problem.program, interrupt=problem.interrupt, links=problem.links)
        choice = choice_of(problem.program, schedule)
        if smallest <= problem.above_budget_bytes and choice is not None:
            incumbent.start_from(choice)
    return False


def _start_slower(incumbent: _Incumbent) -> None:
    """Start from what the relaxation with slower lanes rounds to (start 5)."""
    problem = incumbent.problem
    for share in SLOWER:
        if not incumbent.best or incumbent.overhead - incumbent.bound <= CLOSE or problem.interrupt:
            return
        incumbent.tell("cut relaxation with slower lanes")
        rounds = lane_bounds(
            problem.program,
            problem.above_budget_bytes,
            {tier: link.slowed(share) for tier, link in problem.links.items()},
            problem.interrupt,
            work=WORK * problem.effort // DEFAULT_EFFORT,
            enough=lambda: incumbent.overhead - CLOSE,
        )
        for each in rounds:
            if each.choice is not None:
                incumbent.start_from(each.choice)


def _anneal(incumbent: _Incumbent, effort: int) -> None:
    """Anneal in rounds until the bound is near: the best, then what was rounded to, twice, and so on.

    What has been annealed lies in a valley; another way down from the start leads to another one.
    """
    for turn in range(ROUNDS):
        if not incumbent.best or incumbent.problem.interrupt or incumbent.overhead - incumbent.bound <= CLOSE:
            return
        incumbent.tell("local search")
        start = incumbent.rounded if turn % AGAIN and incumbent.rounded is not None else incumbent.best[0][1]
        incumbent.anneal(start, effort // TURN, incumbent.problem.seed + AHEAD + turn)


def _answer(incumbent: _Incumbent, recompute: Answer, bound_class: str, *, infeasible: bool, effort: int) -> Answer:
    """The best of all, after simulator and legality checker have agreed to it."""
    problem, program = incumbent.problem, incumbent.problem.program
    notes = {**recompute.notes, "hybrid_moves": str(effort)}
    schedules = [] if recompute.schedule is None else [recompute.schedule]
    for _, choice in incumbent.best[:2]:
        incumbent.state.load_choice(choice)
        schedules.append(incumbent.state.to_schedule())
    ended = Status.TIME_LIMIT if problem.interrupt else Status.FEASIBLE
    if not schedules:
        status = Status.INFEASIBLE if infeasible or not problem.interrupt else Status.TIME_LIMIT
        return Answer(status, None, bound=incumbent.bound, bound_class=bound_class, notes=notes)
    overhead, best = min(((overhead_of(program, s, problem.machine), i) for i, s in enumerate(schedules)))
    assert_within(problem, schedules[best])
    status = Status.OPTIMAL if overhead <= incumbent.bound + PROVEN else ended
    return Answer(status, schedules[best], bound=incumbent.bound, bound_class=bound_class, notes=notes)

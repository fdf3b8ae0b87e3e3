"""Greedy eviction from the unplanned step and from seeds, then a local search: no proof, no solver.

Start points are the unplanned step and every seed that has captured order. Each is repaired to the budget and
cleaned up; the best is annealed. If none can be repaired, the budget is descended to in steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.planners.base import LARGE_OPS, Answer, Problem, Progress, Status
from ebbtide.planners.registry import planner
from ebbtide.planners.search import local_search
from ebbtide.planners.search.interval_state import IntervalState, reruns_of
from ebbtide.step.legality import check
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate

__all__ = ["Incumbent", "checked", "greedy", "start_from"]

Reruns = list[tuple[int, int]]
PROVEN = 1e-6  # distance to the bound at which a plan counts as optimal: the solver's own tolerance
RUNS_PER_MOVE = 1000  # walked per unit of effort in each phase: about 3 s for the default effort, see local_search
START_RUNS_PER_MOVE = 200  # to repair one start point: what is not repaired by then is reached by descent, if at all
HEAT = 0.1  # first temperature of annealing as a share of the gap to the bound, of all overhead where none is known
COLDEST, HOTTEST = 5e-4, 0.005  # its limits, as shares of the unplanned step: the cost of an op or of a few
KEPT_OPS = 200  # programs of up to so many keep all start points that fit
SHARES = (0.0, 0.6)  # of the bytes gained: small inputs held through the peak; both, because neither always wins


class Incumbent:
    """The best reruns found so far for one problem, over one interval state."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.state = IntervalState(problem.program)
        self.reruns: Reruns | None = None
        self.overhead = float("inf")
        self.bound: float | None = None
        self.starts: list[tuple[float, Reruns]] = []  # of a small program: each that fits, with its overhead

    def begin_phase(self, runs_per_move: int = RUNS_PER_MOVE) -> None:
        """Give the searches that follow their share of the effort."""
        self.state.allow_work(self.problem.effort * runs_per_move)

    def offer(self) -> bool:
        """Keep the present state if it fits and is the best; whether it fits."""
        if self.state.peak_bytes > self.problem.above_budget_bytes:
            return False
        if self.state.overhead < self.overhead:
            self.reruns, self.overhead = self.state.reruns, self.state.overhead
        return True

    def take(self, other: Incumbent) -> None:
        """Keep what another search of the same problem found if it is the best."""
        if other.overhead < self.overhead:
            self.reruns, self.overhead = other.reruns, other.overhead

    def tell(self, stage: str, overhead: float | None = None) -> None:
        """Report progress."""
        best = min(self.overhead, overhead if overhead is not None else self.overhead)
        self.problem.progress(Progress(stage, best if best < float("inf") else None, self.bound))

    def anneal(self, moves: int, seed: int) -> None:
        """Anneal from the best."""
        enough = (self.bound or 0.0) + PROVEN
        if self.reruns is None or moves <= 0 or self.overhead <= enough:
            return
        self.state.load(self.reruns)
        self.begin_phase()
        local_search.anneal(
            self.state,
            self.problem.above_budget_bytes,
            moves,
            seed,
            self.problem.interrupt,
            hot=min(max(HEAT * (self.overhead - enough), COLDEST), max(HOTTEST, 1.0 / len(self.problem.program.ops))),
            enough=enough,
            tell=lambda overhead: self.tell("local search", overhead),
        )
        self.offer()

    def descend(self, moves: int, seed: int) -> None:
        """Reach the budget from above in steps, from the unplanned step."""
        self.tell("descending to the budget")
        self.state.load([])
        self.begin_phase()
        local_search.descend(self.state, self.problem.above_budget_bytes, seed, self.problem.interrupt, moves=moves)
        self.offer()


def start_from(incumbent: Incumbent, reruns: Reruns) -> bool:
    """Repair a start point to the budget and clean it up, in each way there is; whether one fits."""
    budget, interrupt = incumbent.problem.above_budget_bytes, incumbent.problem.interrupt
    fits = False
    for share in SHARES:
        incumbent.state.load(reruns)
        incumbent.begin_phase(START_RUNS_PER_MOVE)
        repaired = incumbent.state.peak_bytes > budget
        if repaired:
            local_search.repair(incumbent.state, budget, interrupt, share=share)
        if incumbent.state.peak_bytes <= budget:
            local_search.clean_up(incumbent.state, budget)
            fits = incumbent.offer() or fits
            if len(incumbent.problem.program.ops) <= KEPT_OPS:
                incumbent.starts.append((incumbent.state.overhead, incumbent.state.reruns))
        if not repaired and incumbent.state.stages > LARGE_OPS:
            break  # there was nothing to repair in another way, and cleaning up takes long
    return fits


def checked(problem: Problem, incumbent: Incumbent, notes: dict[str, str], bound_class: str = "") -> Answer:
    """The answer for what was found, after simulator and legality checker have agreed to it."""
    if incumbent.reruns is None:
        status = Status.TIME_LIMIT if problem.interrupt else Status.INFEASIBLE
        return Answer(status, None, bound=incumbent.bound, bound_class=bound_class, notes=notes)
    incumbent.state.load(incumbent.reruns)
    schedule = incumbent.state.to_schedule()
    assert_within(problem, schedule)
    status = Status.TIME_LIMIT if problem.interrupt else Status.FEASIBLE
    if incumbent.overhead <= (incumbent.bound if incumbent.bound is not None else 0.0) + PROVEN:
        status = Status.OPTIMAL
    return Answer(status, schedule, bound=incumbent.bound, bound_class=bound_class, notes=notes)


def assert_within(problem: Problem, schedule: Schedule) -> None:
    """Hold a schedule against the budget and the clauses of legality, as no plan may leave without."""
    above = simulate(problem.program, schedule, problem.machine).above_bytes
    assert above <= problem.above_budget_bytes, f"planned {above} of {problem.above_budget_bytes} bytes"
    violations = check(problem.program, schedule, problem.above_budget_bytes, problem.links)
    assert not violations, f"planned an illegal schedule: {violations[0]}"


def seeds_of(problem: Problem, extra: Sequence[Schedule] = ()) -> list[Reruns]:
    """The start points that seeds give."""
    each = [reruns_of(problem.program, schedule) for schedule in (*problem.seeds, *extra)]
    return [reruns for reruns in each if reruns is not None]


@planner("greedy")
def greedy(problem: Problem) -> Answer:
    """Greedy eviction, clean-up and annealing within the effort."""
    found = Incumbent(problem)
    found.tell("greedy")
    for reruns in ([], *seeds_of(problem)):
        start_from(found, reruns)
    if found.reruns is None:
        found.descend(problem.effort // 2, problem.seed)
    found.anneal(problem.effort, problem.seed)
    return checked(problem, found, {"moves": str(problem.effort)})

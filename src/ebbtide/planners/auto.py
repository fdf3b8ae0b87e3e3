"""The default portfolio: a bound and a seed from the cut relaxation, greedy from several starts, local search.

1. The unplanned step, if it fits: nothing is cheaper. On chains the recurrence of ``chains.bound``, as bound and start
   point: it sees steps run several times, and on equal steps it is the optimum.
2. A first plan: on large programs with repeated blocks that of a proxy program with few of them (``proxy``), otherwise
   that of the linear relaxation of one cut. Where it is far from its bound, greedy from the unplanned step, which wins
   where recomputation chains make new peaks; and from seeds.
3. The cut relaxation (``cut_bound``), cut by cut: a proven bound, and a start point each time, which wins where few
   peaks explain the problem.
4. Where greedy fails or the budget is deep, the budget is descended to in steps as well. Where the bound is far, and
   greedy failed or the floor is near, the schedule of least memory is a start point too: a budget that it fits is
   never called infeasible. So are plans of whole layers (``coarse_starts``).
5. Annealing from the best, in rounds; they end once the bound is near. On programs of up to two hundred ops a round
   goes to each of the two next best start points, if it is still far.
6. On programs of some tens of ops, what is left of the solver's work goes to the whole model (``exact``).
7. Where buffers may be moved, the answer so far is a start point of ``hybrid.portfolio``.

A move costs time in proportion to the ops, so on large programs fewer are made: effort buys about the same time.
"""

from __future__ import annotations

from dataclasses import replace

from ebbtide.planners.base import DEFAULT_EFFORT, FREE_ORDER, LARGE_OPS, PROGRAM_ORDER, Answer, Problem, Status
from ebbtide.planners.bounds.cut_bound import WORK, CutBound, cut_bounds, quick_bound
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.chains.plan import start_from_paths
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.reductions.coarse_starts import coarse_starts
from ebbtide.planners.reductions.proxy import Proxy, proxy_of
from ebbtide.planners.reductions.starts import linear_start, start_from_proxy, start_quickly
from ebbtide.planners.registry import planner
from ebbtide.planners.search import smallest as smallest_search
from ebbtide.planners.search.exact import start_from_model
from ebbtide.planners.search.greedy import PROVEN, Incumbent, checked, seeds_of, start_from
from ebbtide.planners.search.interval_state import reruns_of
from ebbtide.planners.search.orders import CapturedOrder
from ebbtide.planners.search.smallest import smallest_of

__all__ = ["auto", "portfolio"]

FULL_EFFORT_OPS = 750  # up to this many ops each unit of effort is a move; beyond, in inverse proportion
ROUNDS = 4  # of annealing, each from the best: reheating finds more than one slow cooling does
CLOSE = 1e-3  # gap at which rounds end
LAST_TOUCH = 16  # share of the effort for the one round where the gap is that small before it
NEAR = 0.05  # a gap of this share of the overhead is a small one
NEAR_FLOOR = 1.4  # times the floor: above, a plan that fits is a better start than the schedule of least memory
GAIN, MOST_IDLE = 0.02, 2  # rounds that close less of the gap, after which there is no other; 1 where it is small
QUICK = 20  # share of the effort for a first plan of a proxy program
OTHER_STARTS = 2  # besides the best, that are annealed too
COARSE_SHARE = 8  # of the effort, for annealing the plan of each coarsening
PROMISING = 1.5  # times the overhead of what is known: see _start_if_promising
WHOLE_OPS, WHOLE_EFFORT = 40, 1_000  # such programs are solved whole however little effort is left: under a second
DEEP_OVERHEAD = 0.25  # beyond this the descent is tried too: recomputation chains then make the peaks


@planner("auto", finds_smallest=True, moves=True)
def auto(problem: Problem) -> Answer:
    """The best of several starts, improved within the effort, with a proven bound."""
    if not problem.links:
        return portfolio(problem)
    from ebbtide.planners.hybrid.portfolio import hybrid  # compiled code that is not needed otherwise

    alone = replace(problem, tiers=(), seeds=tuple(each for each in problem.seeds if not each.moves))
    return hybrid(problem, portfolio(alone))


def portfolio(problem: Problem, order: CapturedOrder | None = None) -> Answer:
    """Plan without tiers or other planners; ``order`` says for which orders of first runs the bound is to hold."""
    if (kept := keep_all(problem)).status is Status.OPTIMAL:
        return kept
    found = Incumbent(problem)
    start_from_paths(found)
    if order is not None:
        found.bound = None  # that bound is one for captured order
    elif found.overhead <= (found.bound or 0.0) + PROVEN:
        return checked(problem, found, {}, PROGRAM_ORDER)
    small = proxy_of(problem.program)
    if small is not None:
        _quickly_from_proxy(found, small)
        enough = found.reruns is not None  # repairing a large program takes seconds
    else:
        _quickly_from_relaxation(found, order)
        enough = not _far(found, found.bound or 0.0)
    if not enough:
        found.tell("greedy")
        start_from(found, [])
    for reruns in seeds_of(problem):
        _start_if_promising(found, reruns)
    cut = _cuts(found, order, small)
    effort = round(problem.effort * min(1.0, FULL_EFFORT_OPS / len(problem.program.ops)))
    hard, other = found.reruns is None, None
    if (hard or found.overhead - cut.bound > DEEP_OVERHEAD) and not problem.interrupt:
        found.descend(effort // 2, problem.seed)
    if _far(found, cut.bound) and not (cut.infeasible or problem.interrupt):
        if small is not None:
            _from_proxy(found, small, problem.effort)
        if hard or problem.above_budget_bytes <= NEAR_FLOOR * floor_bytes(problem.program)[0]:
            _from_smallest(found)
        if small is None and _far(found, cut.bound):
            other = _from_coarsenings(found, effort // COARSE_SHARE)
    _anneal(found, cut.bound, effort)
    if other is not None and _far(found, cut.bound):
        _anneal(other, cut.bound, effort)
        found.take(other)
    _from_other_starts(found, cut.bound, effort // ROUNDS)
    if not (cut.infeasible or problem.interrupt) and found.overhead > cut.bound + PROVEN:
        start_from_model(found, _model_work(problem, cut))
    notes = {"moves": str(effort), "cuts": str(cut.cuts)}
    return checked(problem, found, notes, PROGRAM_ORDER if order is None else FREE_ORDER)


def _far(incumbent: Incumbent, bound: float) -> bool:
    """Whether another start point may be worth its time."""
    return incumbent.reruns is None or incumbent.overhead - bound > NEAR * incumbent.overhead


def _anneal(incumbent: Incumbent, bound: float, effort: int) -> None:
    """Anneal from the best in rounds, until the bound is near or rounds gain nothing.

    Where it is near already there is one short round; on a large program, where that takes a second, none.
    """
    if len(incumbent.problem.program.ops) >= LARGE_OPS and incumbent.overhead - bound <= CLOSE:
        return
    idle = 0
    for turn in range(ROUNDS):
        before = incumbent.overhead - bound
        incumbent.anneal(effort // (ROUNDS if before > CLOSE else LAST_TOUCH), incumbent.problem.seed + turn)
        gap = incumbent.overhead - bound
        idle = idle + 1 if gap > (1.0 - GAIN) * before else 0
        if gap <= CLOSE or idle >= (MOST_IDLE if _far(incumbent, bound) else 1):
            break


def _from_other_starts(incumbent: Incumbent, bound: float, effort: int) -> None:
    """Anneal from the start points that were not the best: on small programs, where all of them are known."""
    starts = [reruns for _, reruns in sorted(incumbent.starts)]
    distinct = [reruns for index, reruns in enumerate(starts) if reruns not in starts[:index]]
    for reruns in distinct[1 : 1 + OTHER_STARTS]:
        if not _far(incumbent, bound):
            return
        other = Incumbent(incumbent.problem)
        other.bound = incumbent.bound
        other.state.load(reruns)
        other.offer()
        other.anneal(effort, incumbent.problem.seed)
        incumbent.take(other)


def _start_if_promising(incumbent: Incumbent, reruns: list[tuple[int, int]]) -> None:
    """Start from reruns, but on a large program not from those that fit and cost much more than what is known.

    Cleaning up takes longest where most is rerun, and the schedule of least memory is such a start.
    """
    if len(incumbent.problem.program.ops) >= LARGE_OPS:
        incumbent.state.load(reruns)
        fits = incumbent.state.peak_bytes <= incumbent.problem.above_budget_bytes
        if fits and incumbent.state.overhead > PROMISING * incumbent.overhead:
            return
    start_from(incumbent, reruns)


def _from_smallest(incumbent: Incumbent) -> None:
    """Start from the schedule of least memory: where it fits, no budget is called infeasible."""
    incumbent.tell("looking for the smallest workable budget")
    problem = incumbent.problem
    effort = min(smallest_search.FIRST_EFFORT, problem.effort)
    smallest, schedule = smallest_of(problem.program, effort, problem.interrupt)
    if smallest <= incumbent.problem.above_budget_bytes:
        _start_if_promising(incumbent, reruns_of(incumbent.problem.program, schedule) or [])


def _from_coarsenings(incumbent: Incumbent, effort: int) -> Incumbent | None:
    """Start from plans of coarsenings, each annealed for itself first; the best of them, another valley."""
    each: list[Incumbent] = []
    for reruns in coarse_starts(incumbent.problem, effort):
        incumbent.tell("planning by layers")
        other = Incumbent(incumbent.problem)
        other.bound = incumbent.bound
        if start_from(other, reruns):
            other.anneal(effort, incumbent.problem.seed)
            incumbent.take(other)
            each.append(other)
    return min(each, key=lambda other: other.overhead, default=None)


def _quickly_from_proxy(incumbent: Incumbent, small: Proxy) -> None:
    """A first plan from a proxy program."""
    incumbent.tell("planning repeated blocks once")
    start_quickly(incumbent, small)
    if incumbent.reruns is None:
        _from_proxy(incumbent, small, incumbent.problem.effort // QUICK)


def _quickly_from_relaxation(incumbent: Incumbent, order: CapturedOrder | None) -> None:
    """A first plan from the linear relaxation of one cut, and its bound if that holds.

    Not for a large program: the cut relaxation is the same there.
    """
    problem = incumbent.problem
    if len(problem.program.ops) >= LARGE_OPS:
        return
    incumbent.tell("linear relaxation")
    quick = quick_bound(problem.program, problem.above_budget_bytes, problem.interrupt, incumbent.state)
    if order is None:
        incumbent.bound = max(quick.bound, incumbent.bound or 0.0)
    if quick.reruns is not None:
        start_from(incumbent, quick.reruns)


def _from_proxy(incumbent: Incumbent, small: Proxy, effort: int) -> None:
    """Start from what a proxy program is planned to within an effort."""
    incumbent.tell("planning repeated blocks once")
    start_from_proxy(incumbent, small, lambda asked: portfolio(replace(asked, effort=effort)).schedule)


def _work(problem: Problem) -> int:
    """The work that all solvers together may do."""
    return WORK * problem.effort // DEFAULT_EFFORT


def _model_work(problem: Problem, cut: CutBound) -> int:
    """The work left for the whole model: at most half of all; of the smallest programs as by default."""
    if len(problem.program.ops) <= WHOLE_OPS and problem.effort >= WHOLE_EFFORT:
        return WORK // 2
    return min(_work(problem) - cut.work, _work(problem) // 2)


def _cuts(incumbent: Incumbent, order: CapturedOrder | None, small: Proxy | None) -> CutBound:
    """Bounds and start points of the cut relaxation, until one is proven optimal or the work is done."""
    problem = incumbent.problem
    incumbent.tell("cut relaxation")
    least = incumbent.bound or 0.0
    cut = CutBound(least, False, 0)
    rounds = cut_bounds(
        problem.program,
        problem.above_budget_bytes,
        problem.interrupt,
        state=incumbent.state,
        work=_work(problem),
        enough=lambda: incumbent.overhead - PROVEN,
        order=order,
        start=None if small is None else linear_start(problem, small),
    )
    for cut in rounds:
        cut = replace(cut, bound=max(cut.bound, least))
        incumbent.bound = cut.bound
        if cut.reruns is not None:
            start_from(incumbent, cut.reruns)
        incumbent.tell("cut relaxation")
    incumbent.bound = cut.bound
    return cut

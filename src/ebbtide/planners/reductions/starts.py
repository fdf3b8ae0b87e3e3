"""Start points for a large program from plans of its proxy (``proxy``), at budgets that suit what is carried.

The proxy is asked for as much of each block as the budget asks of the large program's. What is carried then may be
over the budget by some percent. Repairing that takes evictions in proportion to excess and ops, each of which looks at
every op: on the largest programs the proxy is rather asked again, for the excess too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ebbtide.planners.base import Problem, silent
from ebbtide.planners.bounds.cut_basis import Start
from ebbtide.planners.bounds.cut_bound import quick_bound
from ebbtide.planners.reductions.proxy import Proxy
from ebbtide.planners.search.greedy import Incumbent, Reruns, start_from
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.step.schedule import Schedule

__all__ = ["linear_start", "quick_plan", "start_from_proxy", "start_quickly"]

Plan = Callable[[Problem], Schedule | None]
ASKED = 3  # times at most
REPAIRED = 1e7  # share of the budget times ops squared: an excess that is repaired in about a tenth of a second


def start_quickly(incumbent: Incumbent, small: Proxy) -> None:
    """Start from quick plans of a proxy program, unless what is carried is far from fitting."""
    problem, excess = incumbent.problem, 0
    least = REPAIRED * problem.above_budget_bytes / len(problem.program.ops) ** 2
    for _ in range(ASKED):
        carried = _carried(incumbent, small, quick_plan, excess)
        more = min((_peak(incumbent, reruns) for reruns in carried), default=0) - problem.above_budget_bytes
        if not carried or more <= least or problem.interrupt:
            _start(incumbent, carried)
            return
        excess += more


def start_from_proxy(incumbent: Incumbent, small: Proxy, plan: Plan) -> None:
    """Start from the plan of a proxy program, repaired however long that takes.

    Args:
        incumbent: of the large program.
        small: its proxy program.
        plan: how to plan the proxy program.
    """
    _start(incumbent, _carried(incumbent, small, plan, 0))


def linear_start(problem: Problem, small: Proxy) -> Start | None:
    """Where the linear relaxation of a large program begins: at the optimum of its proxy's."""
    asked = small.reduce(problem).problem
    basis = quick_bound(asked.program, asked.above_budget_bytes, problem.interrupt, IntervalState(asked.program)).basis
    return None if basis is None else Start(basis, small.isomorphic_ops())


def _carried(incumbent: Incumbent, small: Proxy, plan: Plan, excess: int) -> list[Reruns]:
    """Reruns from a plan of the proxy program, for so many bytes less than the budget of the large program."""
    tighter = incumbent.problem.above_budget_bytes - excess
    reduced = small.reduce(replace(incumbent.problem, above_budget_bytes=tighter, progress=silent))
    schedule = plan(reduced.problem)
    return [] if schedule is None else list(reduced.lift(schedule))


def _start(incumbent: Incumbent, carried: list[Reruns]) -> None:
    for index, reruns in enumerate(carried):
        if reruns not in carried[:index]:
            start_from(incumbent, reruns)


def quick_plan(problem: Problem) -> Schedule | None:
    """A plan in hundredths of a second: the linear relaxation of one cut and the unplanned step, repaired."""
    found = Incumbent(problem)
    quick = quick_bound(problem.program, problem.above_budget_bytes, problem.interrupt, found.state)
    for reruns in ([], quick.reruns):
        if reruns is not None:
            start_from(found, reruns)
    if found.reruns is None:
        return None
    found.state.load(found.reruns)
    return found.state.to_schedule()


def _peak(incumbent: Incumbent, reruns: Reruns) -> int:
    incumbent.state.load(reruns)
    return incumbent.state.peak_bytes

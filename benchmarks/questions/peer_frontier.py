"""PyTorch's means, the published planners and Ebbtide on the same model, in turns in one process.

1. Every method has a model of its own, from the same seed, and the same inputs. Peaks are bytes above the step's start,
   by ``ebbtide.measure``; gradients count.
2. Only CPU time of the process counts, at one thread. In every round each method runs once, in an order drawn anew; a
   ratio of two methods is the median over rounds of their ratio in the same round. What else the machine does falls on
   all of them.
3. *Recompute peers* run the kernels that eager runs and recompute some of them: per-block checkpoints, selective
   policies, ``activation_memory_budget`` run op by op. At the peak of each there is a plan of ours.
4. A target is met too where a bound forbids it: no plan of its class is faster than ``1 + bound`` times the captured
   step that keeps everything, so nothing can be faster than that times what capture adds to eager. For peaks the bound
   is the floor.
5. Inductor's kernels are its own: its rows are compared in time and bytes, but no target is against them.
6. All plans of ours are of the captured step, but for one: the smallest budget that ``fit`` names by itself, where
   heads and layers may be computed in slices too. No bound of the captured step holds for it.
7. The published planners have the peak of per-block checkpoints, all of them on three models and one or two of each
   kind on the others. Those that move buffers move them to a disk; the step waits there, and waiting is no CPU time.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ebbtide
from ebbtide import Budget, Case, Plan
from ebbtide.errors import BudgetError
from ebbtide.planners.registry import needs_tiers
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.transfers.disk import disk_tier
from ebbtide.transfers.links import this_machine
from harness.grid import Captured, captured
from harness.measuring import Times
from harness.record import Check, Row, at_most, holds
from suite.bits import differences, measured, off_by, told
from suite.methods import Build, Method, built, checkpointed, eager, memory_budget
from suite.peer_models import MODELS
from suite.pytorch_means import inductor, saved_on_cpu, selective

TITLE = "PyTorch's means, published planners and Ebbtide: peak above the start, and CPU time at one thread"
CASES = tuple(MODELS)
QUICK = ("chain-64",)
ROUNDS = 9
MOST_OF_PEER = 1.02
DEAR, MOST_OF_DEAR = 1.10, 0.95
"""A peer that costs this much over eager is beaten by this much."""
MOST_OF_LOWEST = 0.7
AGAIN = 1.005
"""Peaks as near as this are served by one plan, the lower one's."""
PLANNING_SECONDS = 20.0
OTHERS_BYTES = 2**20
"""Resident beside a model and its arguments: constants that the other methods' captures hold (T5: 8 bytes each)."""
EAGER, KEEP_ALL, CHECKPOINT = "eager", "ebbtide, keep all", "checkpoint per block"
OURS, LOWEST, REWRITTEN = "ebbtide", "ebbtide, lowest", "ebbtide, lowest with rewrites"
MEMORY_BUDGETS = (0.5, 0.2, 0.05)
PLANNERS = (
    "per_block", "min_cut", "chen_sqrt", "chen_greedy", "ap_greedy", "linearized_greedy", "checkmate_lp", "echo",
    "anneal", "chain", "swap", "tflms", "libra", "capuchin",
)  # fmt: skip
WITH_ALL_PLANNERS = ("chain-64", "gpt-12L", "gpt-8L dropout")
ELSEWHERE = ("per_block", "min_cut", "checkmate_lp", "echo", "swap", "libra")

RECOMPUTE: dict[str, Callable[[Build], Method]] = {
    CHECKPOINT: checkpointed,
    "selective: products": partial(selective, every=1),
    "selective: every second product": partial(selective, every=2),
    **{f"activation_memory_budget {each:g}": partial(memory_budget, share=each) for each in MEMORY_BUDGETS},
}
OTHERS: dict[str, Callable[[Build], Method]] = {
    "save_on_cpu": saved_on_cpu,
    "inductor": inductor,
    "inductor, not reordered": partial(inductor, reorder=False),
    "inductor, activation_memory_budget 0.2": partial(inductor, share=0.2),
}


@dataclass(frozen=True)
class Ran:
    """A method that runs, with what a step of it leaves."""

    method: Method
    peak_bytes: int
    differing: list[str]
    off_by: float
    plan: Plan | None = None
    budget_bytes: int | None = None
    serves: tuple[str, ...] = ()


@dataclass
class _Field:
    """All methods on one model, and why the others do not run."""

    build: Build
    known: Captured
    base: dict[str, torch.Tensor]
    ran: dict[str, Ran] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def add(self, label: str, make: Callable[[], Method], **of_plan: Any) -> None:
        """Run a step of what ``make`` gives, or write down why there is none."""
        try:
            method = make()
            peak, left = measured(method)
        except Exception as error:
            self.errors[label] = told(error)
            return
        found = differences(left, self.base)
        off = max((off_by(left.get(name), self.base.get(name)) for name in found), default=0.0)
        self.ran[label] = Ran(method, peak, found, off, **of_plan)


def rows(case: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # gradients of deep chains are in the range where every product is slow
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(os.environ["XDG_CACHE_HOME"]) / "inductor")
    build = MODELS[case]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        begin = time.process_time()
        planners = () if quick else PLANNERS if case in WITH_ALL_PLANNERS else ELSEWHERE
        entrants = _entrants(build, quick, planners, directory)
        times = _in_turns({label: each.method for label, each in entrants.ran.items()}, 3 if quick else ROUNDS)
        for label in entrants.ran:
            yield _row(case, label, entrants, times)
        for label, error in entrants.errors.items():
            yield Row("frontier", {"case": case, "method": label, "error": error})
        yield _summary(case, entrants, times, time.process_time() - begin)


def _entrants(build: Build, quick: bool, planners: Sequence[str], directory: str) -> _Field:
    base = eager(build)
    base.step()
    peak, left = measured(base)
    subject = built(build)
    known = captured(Case(subject.model, kwargs=dict(subject.kwargs)))
    entrants = _Field(build, known, left)
    entrants.ran[EAGER] = Ran(base, peak, [], 0.0)
    for label, make in {**RECOMPUTE, **({} if quick else OTHERS)}.items():
        entrants.add(label, partial(make, build))
    entrants.add(KEEP_ALL, partial(_fitted, build, known.keep_all, None), plan=known.keep_all)
    for budget, labels in _peaks(entrants).items():
        _add_planned(entrants, f"{OURS} at {budget / 2**20:.2f} MiB", "auto", budget, None, serves=labels)
    _add_planned(entrants, LOWEST, "auto", known.smallest_above_bytes, None)
    if not quick:
        _add_rewritten(entrants)
    if CHECKPOINT in entrants.ran:
        for planner in planners:
            tiers = directory if needs_tiers(planner) else None
            _add_planned(entrants, f"planner {planner}", planner, entrants.ran[CHECKPOINT].peak_bytes, tiers)
    return entrants


def _peaks(entrants: _Field) -> dict[int, tuple[str, ...]]:
    """The budgets that serve the recompute peers, each with those that it serves."""
    found: dict[int, tuple[str, ...]] = {}
    peers = {label: entrants.ran[label].peak_bytes for label in RECOMPUTE if label in entrants.ran}
    for label, peak in sorted(peers.items(), key=lambda each: each[1]):
        nearest = next((budget for budget in found if peak <= AGAIN * budget), peak)
        found[nearest] = (*found.get(nearest, ()), label)
    return found


def _add_planned(
    entrants: _Field, label: str, planner: str, above: int, directory: str | None, serves: tuple[str, ...] = ()
) -> None:
    try:
        plan = _plan(entrants.known, planner, above, directory)
    except Exception as error:
        entrants.errors[label] = told(error)
        return
    make = partial(_fitted, entrants.build, plan, directory if plan.schedule.moves else None)
    entrants.add(label, make, plan=plan, budget_bytes=above, serves=serves)


def _add_rewritten(entrants: _Field) -> None:
    """The model under the smallest budget that ``fit`` names (definition 6)."""
    subject = built(entrants.build)
    method = Method(subject, subject.model)
    try:
        smallest = _smallest_named(method)
        ebbtide.fit(subject.model, Budget(bytes=smallest), progress=None)
        method.step()
        plan = ebbtide.plan_of(subject.model)
        assert plan is not None
    except Exception as error:
        entrants.errors[REWRITTEN] = told(error)
        return
    above = plan.budget_bytes - plan.resident_bytes - plan.reserve_bytes
    entrants.add(REWRITTEN, lambda: method, plan=plan, budget_bytes=above)


def _smallest_named(method: Method) -> int:
    """What a refusal says would do."""
    model = method.subject.model
    ebbtide.fit(model, "1KiB", progress=None)
    try:
        method.step()
    except BudgetError as refused:
        return refused.smallest_bytes
    finally:
        ebbtide.unfit(model)
        model.zero_grad()
    raise AssertionError("1 KiB was enough for a step")


def _plan(known: Captured, planner: str, above: int, directory: str | None) -> Plan:
    base = known.keep_all
    machine = None if directory is None else this_machine({"disk": disk_tier(Path(directory))})
    resident = base.resident_bytes + OTHERS_BYTES
    return make_plan(
        known.program,
        Budget(bytes=resident + base.reserve_bytes + above),
        resident_bytes=resident,
        reserve_bytes=base.reserve_bytes,
        options=PlanningOptions(
            planner=planner,
            time_limit_seconds=PLANNING_SECONDS,
            machine=machine,
            tiers=() if directory is None else ("disk",),
        ),
    )


def _fitted(build: Build, plan: Plan, directory: str | None) -> Method:
    """A model under ``plan``, its first (proven) and second (measured) step behind it."""
    subject = built(build)
    tiers = None if directory is None else f"disk:{directory}"
    method = Method(subject, ebbtide.fit(subject.model, plan, tiers=tiers, progress=None))
    for _ in range(2):
        method.step()
        subject.model.zero_grad()
    return method


def _in_turns(methods: Mapping[str, Method], rounds: int) -> dict[str, Times]:
    """CPU seconds per method and round (definition 2); a round before them does not count."""
    seconds: dict[str, list[float]] = {label: [] for label in methods}
    for turn in range(rounds + 1):
        order = list(methods)
        random.Random(turn).shuffle(order)
        for label in order:
            method = methods[label]
            method.subject.model.zero_grad()
            begin = time.process_time()
            method.step()
            spent = time.process_time() - begin
            method.subject.model.zero_grad()
            if turn:
                seconds[label].append(spent)
    return {label: Times(tuple(values)) for label, values in seconds.items()}


def _row(case: str, label: str, entrants: _Field, times: Mapping[str, Times]) -> Row:
    ran, base = entrants.ran[label], entrants.ran[EAGER]
    columns: dict[str, Any] = {
        "case": case,
        "method": label,
        "peak_bytes": ran.peak_bytes,
        "of_eager_peak": ran.peak_bytes / base.peak_bytes,
        "over_eager_median": times[label].median_ratio(times[EAGER]),
        "over_eager_best": times[label].best_ratio(times[EAGER]),
        "bits": "as eager" if not ran.differing else "other than eager",
        "tensors_that_differ": len(ran.differing),
        "first_difference": ran.differing[0] if ran.differing else "",
        "off_by": ran.off_by,
    }
    against = _against(label, entrants, times)
    if ran.plan is not None:
        columns |= {
            "against": against,
            "budget_bytes": ran.budget_bytes,
            "predicted_bytes": ran.plan.timeline.above_bytes,
            "overhead": ran.plan.overhead,
            "bound": ran.plan.bound,
            "status": ran.plan.status.name,
            "plan_seconds": ran.plan.plan_seconds,
        }
    return Row("frontier", columns, tuple(_checks(ran, against)))


def _against(label: str, entrants: _Field, times: Mapping[str, Times]) -> dict[str, dict[str, Any]]:
    """A plan of ours beside each recompute peer that it serves (definition 4)."""
    ran = entrants.ran[label]
    found: dict[str, dict[str, Any]] = {}
    for peer in ran.serves:
        assert ran.plan is not None
        cost = times[peer].median_ratio(times[EAGER])
        ratio, target = times[label].median_ratio(times[peer]), MOST_OF_DEAR if cost >= DEAR else MOST_OF_PEER
        least = _least(ran.plan, times) / cost
        found[peer] = {"ratio": ratio, "target": target, "least": least, "forbidden": least > target}
    return found


def _checks(ran: Ran, against: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
    """Of our rows: bits and budget; and time against every recompute peer that the plan serves."""
    if ran.plan is None:
        return
    yield holds("bits as eager's", not ran.differing)
    if ran.budget_bytes is not None:
        yield at_most("of the budget", ran.peak_bytes / ran.budget_bytes, 1.0)
    for peer, seen in against.items():
        if seen["ratio"] > seen["target"] and seen["forbidden"]:
            yield holds(f"time of {peer}'s {seen['ratio']:.3f}, where no plan has less than {seen['least']:.3f}", True)
        else:
            yield at_most(f"time of {peer}'s", seen["ratio"], seen["target"])


def _least(plan: Plan, times: Mapping[str, Times]) -> float:
    """Of eager's time, what no plan of the bound's class can beat (definition 4)."""
    return (1.0 + (plan.bound or 0.0)) * times[KEEP_ALL].median_ratio(times[EAGER])


def _summary(case: str, entrants: _Field, times: Mapping[str, Times], seconds: float) -> Row:
    """The lowest peaks, and what capture itself adds."""
    recompute = {label: entrants.ran[label].peak_bytes for label in RECOMPUTE if label in entrants.ran}
    others = {label: entrants.ran[label].peak_bytes for label in OTHERS if label in entrants.ran}
    peers = {**recompute, **others}
    lowest_peer = min(peers, key=lambda label: peers[label])
    ours = {label: each.peak_bytes for label, each in entrants.ran.items() if label.startswith(OURS)}
    lowest = min(ours.values())
    plan = entrants.known.keep_all
    floor = plan.floor_bytes - plan.resident_bytes - plan.reserve_bytes
    checks = [
        at_most(
            f"peers that no plan of ours serves: {', '.join(_unserved(entrants)) or 'none'}",
            len(_unserved(entrants)),
            0,
        )
    ]
    share, allowed = lowest / peers[lowest_peer], floor / peers[lowest_peer]
    if share > MOST_OF_LOWEST and allowed > MOST_OF_LOWEST:
        checks.append(holds(f"lowest peak of the peers' {share:.3f} <= 0.7, or forbidden: floor {allowed:.3f}", True))
    else:
        checks.append(at_most("lowest peak of the peers' lowest", share, MOST_OF_LOWEST))
    columns = {
        "case": case,
        "method": "all",
        "lowest_peer": lowest_peer,
        "lowest_peer_bytes": peers[lowest_peer],
        "lowest_bytes": lowest,
        "floor_bytes": floor,
        "of_lowest_peer": share,
        "captured_over_eager": times[KEEP_ALL].median_ratio(times[EAGER]),
        "ops": len(entrants.known.program.ops),
        "eager_seconds_best": times[EAGER].best,
        "spread": statistics.pstdev(times[EAGER].seconds) / times[EAGER].median,
        "cpu_seconds": seconds,
    }
    return Row("frontier", columns, tuple(checks))


def _unserved(entrants: _Field) -> list[str]:
    served = {label for each in entrants.ran.values() for label in each.serves}
    return [label for label in RECOMPUTE if label in entrants.ran and label not in served]

"""Peak against CPU time: Ebbtide, per-block checkpoint and activation_memory_budget, interleaved in one process.

Gradients of chain-64 shrink below 1e-38, and most of its eager CPU time is the slow path for such numbers. No
recomputation touches them, so every method looks cheaper than it is; ``chain-64, denormals flushed`` is the same
comparison with ``torch.set_flush_denormal(True)``, without a target.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import ebbtide
from ebbtide.measurement.resident import resident_bytes
from harness import path_models as peers
from harness.measuring import Times, above_bytes, interleaved, step
from harness.record import Check, Row, at_most, holds

TITLE = "Frontier: peak above the step's start and CPU seconds, against eager in the same run (one thread)"

# case -> share of eager's peak and times eager's CPU seconds to reach (issue "The whole path").
TARGETS = {"chain-64": (0.10, 1.20), "gpt-24L-d128-b8": (0.09, 1.45)}
# Further points of ours: a frontier, never a single point.
SHARES = {"chain-64": (0.50, 0.20), "gpt-24L-d128-b8": (0.50, 0.15)}
ROUNDS = {"chain-64": 25, "gpt-24L-d128-b8": 7}
FLUSHED = ", denormals flushed"
CASES = (*TARGETS, "chain-64" + FLUSHED)
QUICK = ("chain-64",)


def rows(case: str, quick: bool) -> Iterator[Row]:
    """One row per method."""
    torch.set_num_threads(1)
    name = case.removesuffix(FLUSHED)
    torch.set_flush_denormal(name != case)
    args = peers.build(name).args
    methods = {"eager": peers.eager(name), "checkpoint per block": peers.checkpointed(name)}
    for share in peers.MEMORY_BUDGETS[name][: 1 if quick else None]:
        methods[f"activation_memory_budget {share:g}"] = peers.memory_budget(name, share)
    eager_peak = above_bytes(methods["eager"].model, methods["eager"].run, args)
    shares = (*(() if quick else SHARES[name]), TARGETS[name][0])
    plans: dict[str, ebbtide.Plan] = {}
    for share in shares:
        label = f"ebbtide {share:.0%}"
        methods[label], plans[label] = _ours(name, int(share * eager_peak))
    peaks = {key: above_bytes(m.model, m.run, args) for key, m in methods.items()}
    times = interleaved({key: (m.model, m.run) for key, m in methods.items()}, args, 5 if quick else ROUNDS[name])
    for label in methods:
        checks: tuple[Check, ...] = ()
        if name == case and label == f"ebbtide {TARGETS[name][0]:.0%}":
            checks = _checks(name, label, peaks, times)
        yield _row(case, label, peaks, times, plans.get(label), checks)
    if not quick:
        yield _against_best(case, f"ebbtide {TARGETS[name][0]:.0%}", peaks, times)


def _ours(name: str, above: int) -> tuple[peers.Method, ebbtide.Plan]:
    """The model fitted to ``above`` bytes above its start, its first (proven) and second (measured) step behind it."""
    case = peers.build(name)
    ebbtide.fit(case.model, resident_bytes([case.model, case.args]) + above)
    for _ in range(2):
        step(case.model, case.args)
        case.model.zero_grad()
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    return peers.Method(case.model, case.model), plan


def _checks(name: str, label: str, peaks: dict[str, int], times: dict[str, Times]) -> tuple[Check, ...]:
    most_bytes, most_time = TARGETS[name]
    return (
        at_most("peak of eager's", peaks[label] / peaks["eager"], most_bytes),
        at_most("CPU time of eager's", times[label].best_ratio(times["eager"]), most_time),
    )


def _row(
    case: str,
    label: str,
    peaks: dict[str, int],
    times: dict[str, Times],
    plan: ebbtide.Plan | None = None,
    checks: tuple[Check, ...] = (),
    method: str = "",
) -> Row:
    return Row(
        "frontier",
        {
            "case": case,
            "method": method or label,
            "peak_bytes": peaks[label],
            "of_eager": peaks[label] / peaks["eager"],
            "cpu_seconds_best": times[label].best,
            "cpu_ratio_best": times[label].best_ratio(times["eager"]),
            "cpu_ratio_median": times[label].median_ratio(times["eager"]),
            "predicted_overhead": None if plan is None else plan.overhead,
            "plan_seconds": None if plan is None else plan.plan_seconds,
        },
        checks,
    )


def _against_best(case: str, ours: str, peaks: dict[str, int], times: dict[str, Times]) -> Row:
    """The peer with the lowest peak, once more, against our row at the target."""
    peer = min((key for key in peaks if not key.startswith(("eager", "ebbtide"))), key=lambda key: peaks[key])
    lower = holds("ours is lower", peaks[ours] < peaks[peer])
    return _row(case, peer, peaks, times, checks=(lower,), method=f"PyTorch's lowest peak: {peer}")

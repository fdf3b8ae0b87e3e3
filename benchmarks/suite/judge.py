"""One model of the suite, judged: captured or refused by name; bits, peak, overhead and bound; peers beside it.

1. Every method has a model of its own, built from the same seed, and the same inputs.
2. Bits are those of a whole step from the same buffers and random state, without gradients at its start: loss,
   gradients, buffers and the random state that the step leaves, against eager's.
3. Peaks are bytes above the step's start, by ``ebbtide.measure``; gradients count. CPU seconds come from rounds in
   which every method runs once.
4. The compression ratio is that of PyTorch's CI: eager's peak over the method's, resident bytes counted in both.
5. A model takes at most ``MOST_SECONDS`` of CPU time. A peer that does not fit into what is left says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ebbtide._api.verify import Verifier
from ebbtide.errors import CaptureError
from harness.measuring import Times
from harness.record import Check, Row, at_most, holds
from suite.bits import differences, measured, off_by, told, without_paths
from suite.clock import CPUClock, OutOfTime
from suite.methods import Build, Fitted, Method, built, checkpointed, eager, fitted, memory_budget
from suite.subject import NotSupported

__all__ = ["BUDGETS", "MEMORY_BUDGETS", "MOST_SECONDS", "judged"]

MOST_SECONDS = 240.0
"""CPU seconds for one model."""
BUDGETS = (0.5, 0.1)
"""Of the way from the smallest workable peak to the unplanned one."""
MEMORY_BUDGETS = (0.5, 0.2)
_ROUNDS = 5
_KEPT_SECONDS = 20.0
"""For peaks, bits and rounds of the methods that are there."""
EAGER, OURS = "eager", "ebbtide"
CHECKPOINT = "checkpoint per block"
AS_EAGER, OTHER = "as eager", "other than eager"
AS_CAPTURED, WRONG = "as captured, other than eager", "WRONG"
"""Of ours alone: captured order may sum in another order than a fused kernel of eager does."""


def judged(question: str, name: str, build: Build, *, quick: bool = False) -> Iterator[Row]:
    """A row per method; a model that is refused has the row that says so.

    Args:
        question: of the rows.
        name: of the model.
        build: makes the model and its inputs.
        quick: one budget, one round, no compiled peer.
    """
    torch.set_num_threads(1)
    clock = CPUClock(MOST_SECONDS)
    base = eager(build)
    base.step()  # a model that eager cannot train is no model of the suite
    try:
        ours = fitted(build, BUDGETS[:1] if quick else BUDGETS)
    except Exception as refusal:
        yield _refused(question, name, refusal)
        return
    planned_seconds = clock.spent
    peers, errors = _peers(build, () if quick else MEMORY_BUDGETS, clock)
    methods = {EAGER: base, **{f"{OURS} {each.label}": each.method for each in ours}, **peers}
    seen = {label: measured(method) for label, method in methods.items()}
    times = _interleaved(methods, 1 if quick else _ROUNDS, clock)
    resident = ours[0].plan.resident_bytes
    for label, method in methods.items():
        columns = {"case": name, "method": label, **_compared(label, seen, times, resident)}
        mine = next((each for each in ours if each.method is method), None)
        checks: Sequence[Check] = ()
        if label == EAGER:
            columns |= {"resident_bytes": resident, "planned_seconds": planned_seconds, "all_seconds": clock.spent}
            checks = (at_most("CPU seconds", clock.spent, MOST_SECONDS),)
        elif mine is not None:
            columns |= _of_plan(mine)
            if columns["bits"] != AS_EAGER:
                columns["bits"] = _captured_bits(build, mine)
            checks = _held(columns)
        yield Row(question, columns, tuple(checks))
    for label, error in errors.items():
        yield Row(question, {"case": name, "method": label, "error": error})


def _refused(question: str, name: str, refusal: Exception) -> Row:
    """Not captured: by name, with the line and a remedy, or by a fault that names nothing."""
    by_name = isinstance(refusal, CaptureError) and bool(refusal.source or refusal.op)
    columns = {
        "case": name,
        "method": OURS,
        "refused": type(refusal).__name__,
        "source": without_paths(getattr(refusal, "source", "")),
        "error": told(refusal),
    }
    return Row(question, columns, (holds("refused by name, with the line", by_name),))


def _peers(build: Build, shares: Sequence[float], clock: CPUClock) -> tuple[dict[str, Method], dict[str, str]]:
    """Those that run, and why the others do not."""
    makers: dict[str, Callable[[], Method]] = {CHECKPOINT: partial(checkpointed, build)}
    for share in shares:
        makers[f"activation_memory_budget {share:g}"] = partial(memory_budget, build, share)
    peers: dict[str, Method] = {}
    errors: dict[str, str] = {}
    for label, make in makers.items():
        try:
            with clock.interrupting(_KEPT_SECONDS):
                peers[label] = make()
        except OutOfTime:
            errors[label] = "left out for time"
        except NotSupported as reason:
            errors[label] = f"not supported: {reason}"
        except Exception as error:
            errors[label] = told(error)
    return peers, errors


def _interleaved(methods: Mapping[str, Method], most_rounds: int, clock: CPUClock) -> dict[str, Times]:
    """CPU seconds per method and round; fewer rounds where the model's time ends, but one at least."""
    seconds: dict[str, list[float]] = {label: [] for label in methods}
    longest = 0.0
    for turn in range(most_rounds):
        if turn and clock.left < longest + 2.0:
            break
        start = clock.spent
        for label, method in methods.items():
            method.subject.model.zero_grad()
            begin = time.process_time()
            method.step()
            seconds[label].append(time.process_time() - begin)
            method.subject.model.zero_grad()
        longest = max(longest, clock.spent - start)
    return {label: Times(tuple(values)) for label, values in seconds.items()}


def _compared(
    label: str, seen: Mapping[str, tuple[int, dict[str, Tensor]]], times: Mapping[str, Times], resident: int
) -> dict[str, Any]:
    """A method beside eager."""
    (peak, left), (eager_peak, eager_left) = seen[label], seen[EAGER]
    found = differences(left, eager_left)
    return {
        "bits": OTHER if found else AS_EAGER,
        "tensors_that_differ": len(found),
        "first_difference": found[0] if found else "",
        "off_by": max((off_by(left.get(name), eager_left.get(name)) for name in found), default=0.0),
        "peak_bytes": peak,
        "of_eager_peak": peak / eager_peak,
        "compression_ratio": (resident + eager_peak) / (resident + peak),
        "seconds": times[label].best,
        "over_eager": times[label].best_ratio(times[EAGER]),
        "over_eager_median": times[label].median_ratio(times[EAGER]),
    }


def _captured_bits(build: Build, mine: Fitted) -> str:
    """Whether a step that differs from eager's is at least the captured one's, bit for bit."""
    subject = built(build)
    torch.manual_seed(1)
    seen = Verifier(subject.model, (), dict(subject.kwargs)).check(mine.plan)
    return AS_CAPTURED if seen.equal else WRONG


def _of_plan(mine: Fitted) -> dict[str, Any]:
    plan = mine.plan
    return {
        "ops": len(plan.program.ops),
        "budget_bytes": mine.above_bytes,
        "predicted_bytes": plan.timeline.above_bytes,
        "unplanned_bytes": plan.baseline.above_bytes,
        "smallest_bytes": plan.smallest_bytes - plan.resident_bytes - plan.reserve_bytes,
        "overhead": plan.overhead,
        "bound": plan.bound,
        "status": plan.status.name,
    }


def _held(columns: Mapping[str, Any]) -> tuple[Check, ...]:
    return (
        holds("bits as eager's, or as captured order's", columns["bits"] != WRONG),
        at_most("of the budget", columns["peak_bytes"] / columns["budget_bytes"], 1.0),
    )

"""One step of the GPU tier: a subject at a precision, predicted, then measured under every method, a row each.

1. The prediction comes first and needs no card: the model is built without memory, on CPU, and planned for the
   catalogue's machine by roofline. Its bytes and seconds stand beside what is measured.
2. Bytes are the allocator's at the highest point of a step that begins without gradients, everything counted.
   ``first peak`` is that of the very first call, capture and measured costs included.
3. Bits: loss and gradients of a step from one seed equal eager's. Where eager does not equal itself, no method can.
4. Seconds are the median of a method's steps. Methods run one after the other, so that each has the card alone, and
   eager runs again at the end: ``drift`` tells how far the card changed meanwhile.
5. ``hidden share`` is the part of the transfers' seconds for which the card's computing stream did not wait, in the
   step that Ebbtide measured; where the plan says that it is all but a tenth, so it must be.
6. Host seconds are those until everything is launched, from an idle device on. A step whose host seconds are nearly
   its device seconds is bound by launches.
7. ``seconds in a row`` are those of steps that are launched one after the other, of which none begins on an idle
   device: what a loop takes that reads no loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

import ebbtide
from cards import methods
from cards.device import Device, Peak
from cards.methods import Running
from cards.subjects import CASES, SUBJECTS, build
from ebbtide import Case
from ebbtide.capture.without_memory import without_memory
from ebbtide.errors import BudgetError, EbbtideError
from ebbtide.options import DEFAULT_EFFORT
from ebbtide.transfers.traffic import Traffic
from harness.children import short_error
from harness.grid import Captured, captured
from harness.record import Check, Row, at_least, at_most, holds

__all__ = ["CASES", "TITLE", "TITLE_KEY", "rows_on"]

TITLE_KEY = "card"
TITLE = "On a card: PyTorch's means and Ebbtide at the same peaks"
ROUNDS, TOY_ROUNDS = 10, 2
IN_A_ROW = 5
SHARES, TOY_SHARES = (0.5, 0.2), (0.5,)
"""Of ``activation_memory_budget``."""
CHECKPOINT, SAVED = "checkpoint per block", "save_on_cpu"
WITH_HOST = (f"at the peak of {CHECKPOINT}", f"at the peak of {SAVED}", "smallest")
"""Budgets that are also planned with the host's memory, where there is a card."""
ABOVE_SMALLEST = 1.02
HIDDEN_TARGET = 0.9
PREDICTION_TARGET = 0.01  # DESIGN 7: the gate on the peak, on CUDA
_ROUNDING = 2**10  # bytes; on toys a scalar gradient is more than 1 %
TOY_EFFORT = 100


@dataclasses.dataclass(frozen=True)
class _Tier:
    """What is the same for all methods of a step."""

    name: str
    device: Device
    toy: bool
    roofline: Captured
    words: tuple[str, ...] = ()

    def wants(self, method: str) -> bool:
        """Whether the row of ``method`` was asked for."""
        return not self.words or any(word in method for word in self.words)

    def build(self) -> Case:
        return build(self.name, self.device.kind, self.device.total_bytes, toy=self.toy)

    @property
    def blocks(self) -> tuple[str, ...]:
        return SUBJECTS[self.name.rpartition("-")[0]].blocks

    @property
    def rounds(self) -> int:
        return TOY_ROUNDS if self.toy else ROUNDS


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What one method gave."""

    peak: Peak
    first: Peak
    seconds: float
    host_seconds: float
    row_seconds: float
    results: dict[str, torch.Tensor]
    setup_seconds: float
    plan: ebbtide.Plan | None
    traffic: Traffic | None


def rows_on(device: Device, name: str, *, toy: bool, words: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of the case ``name``, the prediction first; of methods that have one of ``words``, if there are any."""
    begin = time.perf_counter()
    tier = _Tier(name, device, toy, _roofline(name, device, toy), tuple(words))
    yield _predicted(tier, time.perf_counter() - begin)
    base = _seen(tier, methods.eager)
    again = _seen(tier, methods.eager)
    repeats = _equal(base, again)
    yield _row(tier, "eager", base, base, None, repeats)
    peers: dict[str, Callable[[Case], Running]] = {CHECKPOINT: lambda case: methods.checkpointed(case, tier.blocks)}
    peers[SAVED] = methods.saved_on_cpu
    for share in TOY_SHARES if toy else SHARES:
        peers[f"activation_memory_budget {share:g}"] = lambda case, share=share: methods.memory_budget(case, share)
    budgets: dict[str, int | str] = {"keep all": "1000%"}  # the first that are given come first, should time run out
    for label, make in peers.items():
        if not any(tier.wants(row) for row in (label, *_names_of_ours(tier, f"at the peak of {label}"))):
            continue
        try:
            seen = _seen(tier, make)
        except Exception as error:  # a peer's failure is a finding of its own, and no reason to stop
            yield _failed(tier, label, error, counts=False)
            continue
        yield _row(tier, label, seen, base, None, repeats)
        assert seen.peak.allocated_bytes is not None
        budgets[f"at the peak of {label}"] = seen.peak.allocated_bytes
    for label, budget in budgets.items():
        yield from _ours_with_host(tier, label, budget, base, repeats)
    if any(map(tier.wants, _names_of_ours(tier, "smallest"))):
        try:
            smallest = _smallest_bytes(tier)
        except EbbtideError as error:
            yield _failed(tier, "ebbtide, smallest", error, counts=True)
        else:
            yield from _ours_with_host(tier, "smallest", smallest, base, repeats)
    yield _drift(tier, base)


def _names_of_ours(tier: _Tier, label: str) -> dict[str, str | None]:
    """The methods of Ebbtide at a budget, with the tier that they move to."""
    names: dict[str, str | None] = {f"ebbtide, {label}": None}
    if tier.device.kind == "cuda" and label in WITH_HOST:
        names[f"ebbtide and the host, {label}"] = "host"
    return names


def _ours_with_host(tier: _Tier, label: str, budget: int | str, base: _Seen, repeats: bool) -> Iterator[Row]:
    for name, to in _names_of_ours(tier, label).items():
        if tier.wants(name):
            yield _ours(tier, name, budget, base, repeats, to)


def _roofline(name: str, device: Device, toy: bool) -> Captured:
    """Definition 1; CUDA's autocast does nothing to CPU tensors, so its step is traced on the card, and not run."""
    if name.endswith("bfloat16"):
        return captured(build(name, device.kind, device.total_bytes, toy=toy), machine=device.machine)
    with without_memory():
        case = build(name, "cpu", device.total_bytes, toy=toy)
    return captured(case, machine=device.machine)


def _failed(tier: _Tier, label: str, error: BaseException, *, counts: bool) -> Row:
    """A method that did not run, and why; ``counts`` if it should have."""
    tier.device.release()
    columns = {"case": tier.name, "method": label, "error": short_error([f"{type(error).__name__}: {error}"])}
    return Row(TITLE_KEY, columns, (holds("it runs", False),) if counts else ())


def _predicted(tier: _Tier, seconds: float) -> Row:
    plan = tier.roofline.keep_all
    return Row(
        TITLE_KEY,
        {
            "case": tier.name,
            "method": "predicted, keep all",
            "predicted_bytes": plan.baseline_peak_bytes,
            "share_of_card": plan.baseline_peak_bytes / tier.device.total_bytes,
            "roofline_seconds": plan.baseline_seconds,
            "setup_seconds": seconds,
        },
    )


def _seen(tier: _Tier, make: Callable[[Case], Running]) -> _Seen:
    """One method measured from its first call on, with nothing else alive."""
    device = tier.device
    device.release()
    begin = time.perf_counter()
    case = tier.build()
    with device.watch(case.model, case.args, case.kwargs, first=True) as first:
        running = make(case)
        running.step()
    for _ in range(2):  # what the second step measures of itself, and warm-up
        running.step()
    setup = time.perf_counter() - begin
    results = running.results()
    with device.watch(case.model, case.args, case.kwargs) as peak:
        running.step()
    case.model.zero_grad(set_to_none=True)
    times = [device.timed(running.step) for _ in range(tier.rounds)]
    seconds, host = (statistics.median(each[i] for each in times) for i in (0, 1))
    row_seconds = device.timed(functools.partial(_in_a_row, running))[0] / IN_A_ROW
    plan = traffic = None
    with contextlib.suppress(ebbtide.errors.UsageError):  # not fitted: a peer
        plan = ebbtide.plan_of(case.model)
        step = ebbtide.step_of(case.model)
        traffic = None if step is None else step.traffic
    del running, case
    device.release()
    return _Seen(peak, first, seconds, host, row_seconds, results, setup, plan, traffic)


def _in_a_row(running: Running) -> None:
    for _ in range(IN_A_ROW):
        running.step()


def _equal(one: _Seen, other: _Seen) -> bool:
    names = one.results.keys()
    return names == other.results.keys() and all(torch.equal(one.results[n], other.results[n]) for n in names)


def _row(
    tier: _Tier, label: str, seen: _Seen, base: _Seen, budget: int | None, repeats: bool, checks: tuple[Check, ...] = ()
) -> Row:
    plan = seen.plan
    assert base.peak.allocated_bytes is not None
    return Row(
        TITLE_KEY,
        {
            "case": tier.name,
            "method": label,
            "budget_bytes": budget,
            "predicted_bytes": None if plan is None else plan.predicted_peak_bytes,
            "peak_bytes": seen.peak.allocated_bytes,
            "first_peak_bytes": seen.first.allocated_bytes,
            "reserved_bytes": seen.peak.reserved_bytes,
            "share_of_eager": (seen.peak.allocated_bytes or 0) / base.peak.allocated_bytes,
            "share_of_card": (seen.peak.allocated_bytes or 0) / tier.device.total_bytes,
            "equal_to_eager": _equal(seen, base),
            "eager_repeats": repeats,
            "step_seconds": seen.seconds,
            "over_eager": seen.seconds / base.seconds,
            "seconds_in_a_row": seen.row_seconds,
            "over_eager_in_a_row": seen.row_seconds / base.row_seconds,
            "predicted_overhead": None if plan is None else plan.overhead,
            "predicted_seconds": None if plan is None else plan.step_seconds,
            "roofline_overhead": _roofline_overhead(tier, plan),
            "host_seconds": seen.host_seconds,
            "host_over_step": seen.host_seconds / seen.seconds,
            **_moved(plan, seen.traffic),
            "setup_seconds": seen.setup_seconds,
        },
        checks,
    )


def _moved(plan: ebbtide.Plan | None, traffic: Traffic | None) -> dict[str, object]:
    """What moved, what the lanes and the waits took, as planned and as measured, and the link that was planned with."""
    if plan is None or traffic is None or plan.machine is None:
        return {}
    link = plan.machine.links["host"]
    return {
        "moved_bytes": traffic.out_bytes + traffic.in_bytes,
        "link_out_bytes_per_second": link.out_bytes_per_second,
        "link_in_bytes_per_second": link.in_bytes_per_second,
        "link_duplex": link.duplex,
        "planned_transfer_seconds": plan.timeline.transfer_seconds,
        "transfer_seconds": traffic.transfer_seconds,
        "planned_waited_seconds": plan.timeline.waited_seconds,
        "waited_seconds": traffic.waited_seconds,
        "hidden_share": traffic.hidden_share,
    }


def _roofline_overhead(tier: _Tier, plan: ebbtide.Plan | None) -> float | None:
    """What roofline said for a plan of the same share above the smallest; ``None`` where it had no plan."""
    if plan is None:
        return None
    try:
        above = plan.budget_bytes - plan.resident_bytes - plan.reserve_bytes
        return tier.roofline.plan(max(above, 1), effort=TOY_EFFORT if tier.toy else 2_000).overhead
    except BudgetError:
        return None


def _smallest_bytes(tier: _Tier) -> int:
    """The smallest workable budget on this device, with a little room, everything counted."""
    device = tier.device
    case = tier.build()
    known = captured(case)
    torch.manual_seed(methods.SEED)
    methods.eager(case).step()  # what libraries hold from their first call on is resident as well
    case.model.zero_grad(set_to_none=True)
    resident = device.allocated_bytes(case.model, case.args, case.kwargs)
    smallest = resident + known.keep_all.reserve_bytes + int(ABOVE_SMALLEST * known.smallest_above_bytes)
    del case, known
    device.release()
    return smallest + (_ROUNDING if tier.toy else 0)


def _ours(tier: _Tier, name: str, budget: int | str, base: _Seen, repeats: bool, tiers: str | None) -> Row:
    planner = "keep_all" if budget == "1000%" else "auto"
    effort = TOY_EFFORT if tier.toy else DEFAULT_EFFORT
    try:
        seen = _seen(tier, lambda case: methods.fitted(case, budget, effort, planner, tiers))
    except (EbbtideError, torch.OutOfMemoryError) as error:
        refused = isinstance(error, BudgetError) and not name.endswith(
            "smallest"
        )  # a peer can be below what we can plan
        return _failed(tier, name, error, counts=not refused)
    limit = budget if isinstance(budget, int) else None
    return _row(tier, name, seen, base, limit, repeats, _checks(seen, base, limit, repeats))


def _checks(seen: _Seen, base: _Seen, budget: int | None, repeats: bool) -> tuple[Check, ...]:
    assert seen.plan is not None
    assert seen.peak.allocated_bytes is not None
    off = abs(seen.plan.predicted_peak_bytes - seen.peak.allocated_bytes)
    checks = [
        holds("equal to eager, where eager is to itself", _equal(seen, base) or not repeats),
        at_most("prediction error", 0.0 if off <= _ROUNDING else off / seen.peak.allocated_bytes, PREDICTION_TARGET),
    ]
    if budget is not None:
        checks.append(holds("within budget", seen.peak.allocated_bytes <= budget))
        if seen.first.allocated_bytes is not None:
            checks.append(holds("within budget from the first call on", seen.first.allocated_bytes <= budget))
    timeline, traffic = seen.plan.timeline, seen.traffic
    if traffic is not None and timeline.waited_seconds <= (1 - HIDDEN_TARGET) * timeline.transfer_seconds:
        checks.append(at_least("hidden share of what the plan hides", traffic.hidden_share, HIDDEN_TARGET))
    return tuple(checks)


def _drift(tier: _Tier, base: _Seen) -> Row:
    seen = _seen(tier, methods.eager)
    columns = {"case": tier.name, "method": "eager, once more", "step_seconds": seen.seconds}
    return Row(TITLE_KEY, {**columns, "over_eager": seen.seconds / base.seconds})

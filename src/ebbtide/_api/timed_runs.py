"""A plan tried out: one model, its step under the plan and in captured order, measured bytes and time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ebbtide._api.fit import fit, unfit
from ebbtide.case import Case
from ebbtide.errors import UsageError
from ebbtide.measurement.peak import measure
from ebbtide.optimizer.state.future_bytes import future_state_bytes
from ebbtide.options import Options
from ebbtide.report.plan import Plan
from ebbtide.report.records.curve import Curve, Marks, curve_of
from ebbtide.torch_seams import trees as pytree

__all__ = ["Trial", "try_plans"]

STEPS = 5
"""Timed steps of each plan; their median counts."""


@dataclass(frozen=True)
class Trial:
    """What running a plan gave.

    Attributes:
        measured_peak_bytes: of one step, resident part included.
        step_seconds: median of the planned steps: CPU time on CPU, device time on CUDA.
        unplanned_seconds: median of the step in captured order, run before.
        curve: memory over the measured step, where that was recorded.
    """

    measured_peak_bytes: int
    step_seconds: float
    unplanned_seconds: float
    curve: Curve | None = None

    @property
    def measured_overhead(self) -> float:
        """Measured seconds over those of the unplanned step, minus one."""
        return self.step_seconds / self.unplanned_seconds - 1.0


def try_plans(case: Case, plans: Iterable[Plan], steps: int = STEPS) -> Iterator[Trial]:
    """Run every plan, one after the other, on the case's own model. The unplanned step has to fit as well.

    Args:
        case: a real model and arguments; its call gives the loss.
        plans: made for the case on this device.
        steps: timed steps of each.

    Raises:
        UsageError: if the call gives no scalar loss.
    """
    if case.loss is not None:
        raise UsageError(
            f"{case.name or 'the case'} has its loss outside the model, as part of the planned step; put it inside "
            "the model to run it",
            argument="loss",
            value=case.loss,
        )
    unplanned, _, _ = _run(case, "1000%", steps, planner="keep_all")
    for plan in plans:
        seconds, peak, curve = _run(case, plan, steps)
        yield Trial(peak, seconds, unplanned, curve)


def _run(case: Case, budget: str | Plan, steps: int, *, planner: str = "auto") -> tuple[float, int, Curve | None]:
    """Median seconds of a step, and of one its peak and memory over it."""
    optimizer = Options(optimizer=case.optimizer).optimizer_of(case.model)
    to_come = future_state_bytes(optimizer) if optimizer is not None else 0  # no step of it is taken here
    asked = Options(planner=planner, optimizer=optimizer, gradients=case.gradients, verify=False)
    fit(case.model, budget, options=asked)
    try:
        _step(case)  # captures
        seconds = statistics.median(_step(case)[0] for _ in range(steps))
        case.model.zero_grad()  # gradients of the step before are not resident at the start of this one
        with measure(case.model, case.args, case.kwargs, optimizer) as gauge:
            _, marks = _step(case)
        curve = curve_of(gauge.events, marks, gauge.start_bytes + to_come)
        return seconds, gauge.peak_bytes + to_come, curve
    finally:
        unfit(case.model)
        case.model.zero_grad()


def _step(case: Case) -> tuple[float, Marks]:
    """Seconds of forward and backward from no gradients, and when they ran."""
    case.model.zero_grad()
    on_cuda = any(p.is_cuda for p in case.model.parameters())
    if on_cuda:
        torch.cuda.synchronize()
    begin, begin_ns = time.perf_counter() if on_cuda else time.process_time(), time.time_ns()
    loss = _loss(case.model(*case.args, **case.kwargs), case)
    boundary_ns = time.time_ns()
    torch.autograd.backward(loss)
    if on_cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() if on_cuda else time.process_time()) - begin
    return seconds, Marks(begin_ns, boundary_ns, time.time_ns())


def _loss(outputs: object, case: Case) -> torch.Tensor:
    """The first scalar that takes a gradient among the outputs."""
    tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    loss = next((t for t in tensors if t.numel() == 1 and t.requires_grad), None)
    if loss is None:
        raise UsageError(f"{case.name or 'the case'} returns no scalar loss; put the loss inside the model to run it")
    return loss

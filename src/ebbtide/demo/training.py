"""The demo's experiment: copies of one model trained side by side on the same batches.

1. Every copy starts from the same seed and keeps a random state of its own, so what differs is how its steps run:
   eager, in captured order (unplanned), or under a plan.
2. The copies take turns step by step, so that a machine that slows down slows all of them.
3. Seconds are the process's CPU time over forward and backward. The first two steps do not count: they capture,
   verify and measure. Nor does the last, in which the allocator is watched.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ebbtide._api.fit import fit, step_of
from ebbtide.demo.text import batches
from ebbtide.errors import UsageError
from ebbtide.measurement.peak import measure
from ebbtide.measurement.resident import resident_parts, tensors_in
from ebbtide.options import Options
from ebbtide.report.plan import Plan
from ebbtide.report.records.curve import Curve, Marks, curve_of
from ebbtide.report.text.demo import DemoRecord
from ebbtide.zoo import GPTConfig, gpt

__all__ = ["DemoConfig", "run_demo"]

SKIPPED_STEPS = 2  # definition 3
LEAST_STEPS = 4  # so that one step is left to time
LEARNING_RATE = 5e-4  # there is no warm-up, and 1e-3 overshoots at step 20 (a loss of 9.8 after 2.9), in eager as well
VOCABULARY = 256  # bytes


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the demo trains."""

    steps: int = 20
    """Optimizer steps of every copy."""
    budget: str = "50%"
    """Of the planned copy."""
    layers: int = 6
    """Blocks of the model."""
    width: int = 256
    """Size of the residual stream."""
    length: int = 256
    """Bytes of text per sequence."""
    batch: int = 6
    """Sequences per step."""
    seed: int = 0
    """Of weights, dropout and batches."""

    def __post_init__(self) -> None:
        if self.steps < LEAST_STEPS:
            raise UsageError(f"--steps {self.steps} is too few; {LEAST_STEPS} or more leave one to time")


class _Copy:
    """One copy in training: definition 1."""

    def __init__(self, config: DemoConfig) -> None:
        torch.manual_seed(config.seed)
        sizes = GPTConfig(
            vocabulary=VOCABULARY,
            length=config.length,
            layers=config.layers,
            width=config.width,
            heads=max(1, config.width // 32),
            dropout=0.1,
        )
        case = gpt(config.batch, sizes)
        self.name = case.name
        self.model = case.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []
        self.start_bytes = 0
        self.peak_bytes = 0
        self.curve: Curve | None = None
        self.resident_parts: dict[str, int] = {}
        self.random_state = torch.get_rng_state()

    def step(self, batch: tuple[torch.Tensor, torch.Tensor], *, measured: bool = False) -> None:
        """One optimizer step; if ``measured``, its peak is taken, ``optimizer.step()`` included."""
        gauge = None
        if measured:
            gauge = measure(self.model, self.optimizer, batch)
            self.resident_parts = resident_parts(self.model, batch, tensors_in(self.optimizer))
        with self._own_random_state(), gauge or contextlib.nullcontext():
            begin, begin_ns = time.process_time(), time.time_ns()
            loss = self.model(*batch)
            boundary_ns = time.time_ns()
            loss.backward()
            self.seconds.append(time.process_time() - begin)
            marks = Marks(begin_ns, boundary_ns, time.time_ns())
            self.optimizer.step()
        if gauge is not None:
            self.start_bytes, self.peak_bytes = gauge.start_bytes, gauge.peak_bytes
            self.curve = curve_of(gauge.events, marks, gauge.start_bytes)
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach().clone())

    @property
    def step_seconds(self) -> float:
        """Median CPU seconds of a step: definition 3."""
        return statistics.median(self.seconds[SKIPPED_STEPS:-1])

    @contextlib.contextmanager
    def _own_random_state(self) -> Iterator[None]:
        torch.set_rng_state(self.random_state)
        yield
        self.random_state = torch.get_rng_state()


def run_demo(config: DemoConfig, say: Callable[[str], None]) -> tuple[DemoRecord, Plan]:
    """Train eager, unplanned and planned copies and hold them against each other.

    Args:
        config: what to train.
        say: told what is done now.

    Returns:
        What was found, and the plan that ran, as of the measured step.

    Raises:
        UsageError: for a budget or number of steps that is none.
        BudgetError: before any training, if the budget is too small.
        VerificationError: if a recomputed buffer has other bits than it had.
        BudgetExceeded: if a planned step took more than its budget.
    """
    eager, unplanned, planned = _Copy(config), _Copy(config), _Copy(config)
    # The planned copy goes first: a budget that is too small ends the demo before anything is trained.
    fit(planned.model, config.budget, optimizer=planned.optimizer)
    fit(unplanned.model, "1000%", options=Options(planner="keep_all", optimizer=unplanned.optimizer, verify=False))
    data = batches(config.steps, config.batch, config.length, config.seed)
    begin = time.monotonic()
    for index, batch in enumerate(data):
        last = index == len(data) - 1
        copies = ((planned, "planned"), (unplanned, "unplanned"), (eager, "eager"))
        for place, (copy, kind) in enumerate(copies):
            what = f" ({kind}: capture, cost of every op, plan)" if index == 0 and copy is not eager else ""
            left = _left(begin, 3 * (index - 1) + place, 3 * (config.steps - index) - place)
            say(f"step {index + 1} of {config.steps}{what}{left}")
            copy.step(batch, measured=last)
        if index == 0:
            begin = time.monotonic()  # the first takes longer than all others: what follows is told from these
    return _record(config, eager, unplanned, planned)


def _left(begin: float, done: int, steps: int) -> str:
    """How long ``steps`` of single copies take, in words, at the pace of those ``done`` since ``begin``; or nothing."""
    if done < 3:  # the copies take unequal times
        return ""
    return f", about {(time.monotonic() - begin) / done * steps:.0f} s left"


def _record(config: DemoConfig, eager: _Copy, unplanned: _Copy, planned: _Copy) -> tuple[DemoRecord, Plan]:
    step = step_of(planned.model)
    assert step is not None
    assert step.plan is not None
    plan = replace(
        _as_of(step.plan, planned.start_bytes, planned.name),
        resident_parts={kind: size for kind, size in planned.resident_parts.items() if size},
    )
    record = DemoRecord(
        plan=plan,
        steps=config.steps,
        losses=tuple(loss.item() for loss in planned.losses),
        losses_equal=torch.equal(torch.stack(planned.losses), torch.stack(eager.losses)),
        parameters_equal=all(
            torch.equal(a, b) for a, b in zip(planned.model.parameters(), eager.model.parameters(), strict=True)
        ),
        random_state_equal=torch.equal(planned.random_state, eager.random_state),
        verified_buffers=step.verified_buffers,
        measured_peak_bytes=planned.peak_bytes,
        unplanned_peak_bytes=unplanned.peak_bytes,
        eager_peak_bytes=eager.peak_bytes,
        measured_step_seconds=planned.step_seconds,
        unplanned_step_seconds=unplanned.step_seconds,
        eager_step_seconds=eager.step_seconds,
        curves=(planned.curve, unplanned.curve, eager.curve),
    )
    return record, plan


def _as_of(plan: Plan, start_bytes: int, case: str) -> Plan:
    """``plan`` for a step that starts at ``start_bytes``: what was reserved for optimizer state is resident by now."""
    moved = start_bytes - plan.resident_bytes - plan.reserve_bytes
    return replace(
        plan,
        case=case,
        resident_bytes=start_bytes,
        reserve_bytes=0,
        floor_bytes=plan.floor_bytes + moved,
        smallest_bytes=plan.smallest_bytes + moved,
    )

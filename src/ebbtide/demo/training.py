"""The demo's experiment: copies of one model trained side by side on the same batches.

1. Every copy starts from the same seed and keeps a random state of its own, so what differs is how its steps run:
   under a plan, with checkpoints, or as they are (eager).
2. The checkpointed copy has ``torch.utils.checkpoint`` around as few blocks as keep its peak within the same budget,
   the first ones, whose memory is given back last; around all of them where no number does.
3. The copies take turns step by step, so that a machine that slows down slows all of them.
4. Seconds are the process's CPU time over forward and backward. The first two steps do not count: they capture,
   verify and measure. Nor does the last, in which the allocator is watched.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.checkpoint import checkpoint

from ebbtide._api.fit import fit, step_of
from ebbtide.demo.text import batches
from ebbtide.errors import UsageError
from ebbtide.measurement.peak import measure
from ebbtide.measurement.resident import resident_parts, tensors_in
from ebbtide.planners import Interrupt, Progress
from ebbtide.report.plan import Plan
from ebbtide.report.records.curve import Curve, Marks, curve_of
from ebbtide.report.text.demo import DemoRecord, Taken
from ebbtide.zoo import GPTConfig, gpt
from ebbtide.zoo.gpt import GPT

__all__ = ["DemoConfig", "run_demo"]

SKIPPED_STEPS = 2  # definition 4
LEAST_STEPS = 4  # so that one step is left to time
Batch = tuple[torch.Tensor, torch.Tensor]
LEARNING_RATE = 5e-4  # there is no warm-up, and 1e-3 overshoots at step 20 (a loss of 9.8 after 2.9), in eager as well
VOCABULARY = 256  # bytes


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the demo trains."""

    steps: int = 10
    """Optimizer steps of every copy."""
    budget: str = "50%"
    """Of the planned copy."""
    layers: int = 6
    """Blocks of the model."""
    width: int = 256
    """Size of the residual stream."""
    length: int = 256
    """Bytes of text per sequence."""
    batch: int = 4
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
        assert isinstance(case.model, GPT)
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

    def step(self, batch: Batch, *, measured: bool = False) -> None:
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
        """Median CPU seconds of a step: definition 4."""
        return statistics.median(self.seconds[SKIPPED_STEPS:-1])

    @property
    def above_bytes(self) -> int:
        """Peak of the measured step above its start."""
        return self.peak_bytes - self.start_bytes

    def checkpoint_first(self, count: int) -> None:
        """Run the first ``count`` blocks again in the backward."""
        for block in list(self.model.blocks)[:count]:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    @contextlib.contextmanager
    def _own_random_state(self) -> Iterator[None]:
        torch.set_rng_state(self.random_state)
        yield
        self.random_state = torch.get_rng_state()


def run_demo(
    config: DemoConfig, say: Callable[[Progress], None], interrupt: Interrupt | None = None
) -> tuple[DemoRecord, Plan]:
    """Train eager, checkpointed and planned copies and hold them against each other.

    Args:
        config: what to train.
        say: told what is done now.
        interrupt: set while the copies train, it ends them after the next steps that a proof takes.

    Returns:
        What was found, and the plan that ran, as of the measured step.

    Raises:
        UsageError: for a budget or number of steps that is none.
        BudgetError: before any training, if the budget is too small.
        VerificationError: if a recomputed buffer has other bits than it had.
        BudgetExceeded: if a planned step took more than its budget.
    """
    eager, checkpointed, planned = _Copy(config), _Copy(config), _Copy(config)
    data = batches(config.steps, config.batch, config.length, config.seed)
    # The planned copy goes first: a budget that is too small ends the demo before anything is trained.
    place = f"step 1 of {config.steps}, planned"
    fit(
        planned.model,
        config.budget,
        optimizer=planned.optimizer,
        progress=lambda told: say(replace(told, stage=f"{place}: {told.stage}")),
    )
    say(Progress(place))
    planned.step(data[0])
    plan = _plan_of(planned)
    say(Progress(place, plan.overhead))  # from here on there is something to keep at an interrupt
    blocks = _fewest_blocks(config, data[0], plan, say)
    checkpointed.checkpoint_first(blocks)

    left, index, last = (checkpointed, eager), 0, False
    names = {id(planned): "planned", id(checkpointed): "with checkpoints", id(eager): "eager"}
    while True:
        for copy in left:
            say(Progress(f"step {index + 1} of {config.steps}, {names[id(copy)]}"))
            copy.step(data[index], measured=last)
        if last:
            return _record(eager, checkpointed, planned, blocks)
        left, index = (planned, checkpointed, eager), index + 1
        last = index == len(data) - 1 or (bool(interrupt) and index >= LEAST_STEPS - 1)


def _fewest_blocks(config: DemoConfig, batch: Batch, plan: Plan, say: Callable[[Progress], None]) -> int:
    """How many blocks have to be checkpointed for the plan's budget: definition 2; by bisection, one step a number."""
    allowed = plan.budget_bytes - plan.resident_bytes - plan.reserve_bytes
    fits, fails = config.layers, -1
    while fits - fails > 1:
        count = (fits + fails) // 2
        say(Progress(f"step 1 of {config.steps}, with checkpoints: around {count} of {config.layers} blocks"))
        trial = _Copy(config)
        trial.checkpoint_first(count)
        trial.step(batch, measured=True)
        fits, fails = (count, fails) if trial.above_bytes <= allowed else (fits, count)
    return fits


def _plan_of(planned: _Copy) -> Plan:
    step = step_of(planned.model)
    assert step is not None
    assert step.plan is not None
    return step.plan


def _record(eager: _Copy, checkpointed: _Copy, planned: _Copy, blocks: int) -> tuple[DemoRecord, Plan]:
    step = step_of(planned.model)
    assert step is not None
    plan = replace(
        _as_of(_plan_of(planned), planned.start_bytes, planned.name),
        resident_parts={kind: size for kind, size in planned.resident_parts.items() if size},
    )
    record = DemoRecord(
        plan=plan,
        losses=tuple(loss.item() for loss in planned.losses),
        losses_equal=_equal(planned.losses, eager.losses),
        parameters_equal=_equal([*planned.model.parameters()], [*eager.model.parameters()]),
        random_state_equal=torch.equal(planned.random_state, eager.random_state),
        verified_buffers=step.verified_buffers,
        checkpointed_blocks=blocks,
        blocks=len(planned.model.blocks),
        planned=_taken(planned),
        checkpointed=_taken(checkpointed),
        eager=_taken(eager),
    )
    return record, plan


def _equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def _taken(copy: _Copy) -> Taken:
    return Taken(copy.peak_bytes, copy.step_seconds, copy.curve)


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

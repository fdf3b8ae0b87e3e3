"""One plan for a captured step, as it runs: the plan, what it rests on, and the code that it shares with its schedule.

An executable is never written to. What its code's first runs find out stands in :mod:`~ebbtide.engine.first_runs`.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ebbtide.capture.joint import Captured
from ebbtide.cost.attach import known_workspace
from ebbtide.engine.first_runs import FirstRuns, Measured
from ebbtide.engine.reserve import most_unsplit_bytes, unsplit_bytes
from ebbtide.engine.retained import Retained, retained_above_bytes
from ebbtide.engine.step_code import StepCode, code_of, lowered_and_proven
from ebbtide.engine.tangent_layouts import TangentLayouts
from ebbtide.engine.validity import Demand, Validity, leaves_more
from ebbtide.errors import BudgetExceeded
from ebbtide.faults import users_level
from ebbtide.lower.compared import held_ops
from ebbtide.measurement.peak import StepGauge
from ebbtide.optimizer.in_step.updates import PREFIX
from ebbtide.planning.step_end import SCALARS_BYTES
from ebbtide.report.plan import Plan
from ebbtide.rewrites.replaced import Replaced
from ebbtide.step.op_traits import traits_of_op
from ebbtide.step.program import Program
from ebbtide.step.schedule import Boundary, Compute, Free
from ebbtide.step.simulate import simulate
from ebbtide.transfers.paths import TransferPath
from ebbtide.units import format_allowed, format_bytes, format_percent

__all__ = ["Executable", "executable_numbered", "executable_of", "left_bytes"]

# A measured peak that is further from the prediction than this is worth a word (DESIGN: 0.1 % on CPU, 1 % on CUDA).
_TOLERANCE = {"cpu": 0.001, "cuda": 0.01}

_numbers = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, Executable] = weakref.WeakValueDictionary()


@dataclass(frozen=True, kw_only=True, eq=False)
class Executable:
    """A plan that can run.

    Attributes:
        plan: of the step.
        validity: what the plan rests on.
        code: that runs; of all plans with its schedule.
        first_runs: of the code: what is proven of it.
        measured: of the code: what it was seen to take.
        layouts: of the code: in which gradients of its outputs are expected.
        number: names the executable, in step handles.
    """

    plan: Plan
    validity: Validity
    code: StepCode
    first_runs: FirstRuns
    measured: Measured
    layouts: TangentLayouts
    number: int = field(default_factory=_numbers.__next__)
    _needs: dict[tuple[int, int, Retained | None], int] = field(default_factory=dict, repr=False)  # remembered answers

    def __post_init__(self) -> None:
        _alive[self.number] = self

    def rests_on(self, plan: Plan, validity: Validity) -> Executable:
        """Reuse the code for ``plan``, which has the same schedule: what is resident or the budget has changed."""
        return Executable(
            plan=plan,
            validity=validity,
            code=self.code,
            first_runs=self.first_runs,
            measured=self.measured,
            layouts=self.layouts,
        )

    # -- what it takes ------------------------------------------------------------------------------------------

    @functools.cached_property
    def needs_bytes(self) -> int:
        """Bytes above the step's start, as the plan predicts."""
        return self.plan.timeline.above_bytes

    @functools.cached_property
    def leaves_bytes(self) -> int:
        """What is kept while its step is pending, or by the gradients that its backward has made since."""
        return left_bytes(self.plan)

    @functools.cached_property
    def overhead(self) -> float:
        """That the plan predicts."""
        return self.plan.overhead

    def needs_with(self, between_bytes: int, held_bytes: int, retained: Retained | None = None) -> int:
        """Bytes above the step's start if user code takes so much between the two graphs, or retains the second."""
        plan, key = self.plan, (between_bytes, held_bytes, retained)
        if key not in self._needs:
            same = key == (plan.program.between_bytes, plan.program.held_bytes, None)
            program = replace(plan.program, between_bytes=between_bytes, held_bytes=held_bytes)
            timeline = plan.timeline if same else simulate(program, plan.schedule, plan.machine)
            self._needs[key] = (
                timeline.above_bytes
                if retained is None
                else retained_above_bytes(program, plan.schedule, timeline, retained)
            )
        return self._needs[key]

    @functools.cached_property
    def left_behind_bytes(self) -> int:
        """Bytes of new values that go once copied back: mutations, and those that no backward op reads."""
        program, actions = self.plan.program, self.plan.schedule.actions
        freed = {a.buffer for a in actions[: actions.index(Boundary())] if isinstance(a, Free)}
        return sum(program.buffers[b].bytes for b in program.copied_back.intersection(freed.union(program.mutations)))

    # -- whether it holds ---------------------------------------------------------------------------------------

    def differs(self, now: Demand) -> str | None:
        """Why the plan does not hold for a call that asks for ``now``, for people; ``None`` if it does."""
        window, program = now.window, self.plan.program
        peak, held = program.between_bytes, program.held_bytes + self.validity.cleared_bytes
        if window is not None and (window.peak_bytes, window.held_bytes) != (peak, held):
            # Forwards that come between may be planned for what is left to them.
            peak, held = min(window.peak_bytes, max(peak, window.least_bytes)), window.held_bytes
        free = 0 if now.request.given_plan is not None else self.measured.unsplit_bytes + now.aside_bytes
        over = now.resident_bytes + free - self.plan.budget_bytes
        in_window = over + self.needs_with(peak, held, now.retained)
        why = self.validity.differs(now, self.plan, over + self.needs_bytes, in_window)
        if why is None and leaves_more(now, self.plan.planner, self.leaves_bytes):
            return "forwards in flight were planned with less room for what this one keeps until its backward"
        return why

    @functools.cached_property
    def most_held_bytes(self) -> int:
        """What others may hold from its forward to its step's end."""
        plan, program = self.plan, self.plan.program
        needs = plan.resident_bytes + self.needs_with(program.between_bytes, program.held_bytes)
        return program.held_bytes + self.validity.cleared_bytes + max(plan.budget_bytes - needs, 0)

    # -- a measured step ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Its forward is about to run."""
        plan = self.plan
        self.first_runs.start(plan.budget_bytes - plan.resident_bytes - plan.reserve_bytes)

    def hold_against(self, gauge: StepGauge) -> None:
        """Hold a step's measured peak against budget and prediction.

        Raises:
            BudgetExceeded: if it went over the budget.
        """
        plan, predicted = self.plan, self.plan.timeline.above_bytes
        self.first_runs.measured()
        self.measured.above_bytes = gauge.above_bytes
        peak = plan.resident_bytes + gauge.above_bytes
        if self.code.device == "cuda":
            self._learn_unsplit(gauge)
        if plan.budget_bytes < peak <= plan.predicted_peak_bytes + self.measured.unsplit_bytes:
            warnings.warn(
                f"the step took {format_bytes(peak)}, its budget is {format_allowed(plan.budget_bytes)}: the allocator "
                f"handed out {format_bytes(peak - plan.predicted_peak_bytes)} more than it was asked for. That is kept "
                "free from the next step on. Start the process with PYTORCH_ALLOC_CONF=expandable_segments:True, and "
                "it hands out what it is asked for",
                stacklevel=users_level(),
            )
        elif peak > plan.budget_bytes:
            raise self._exceeded(peak)
        self.measured.reserved = gauge.reserved
        if gauge.reserved is not None and (advice := gauge.reserved.advice(plan.budget_bytes)):
            warnings.warn(advice, stacklevel=users_level())
        error = gauge.above_bytes / predicted - 1 if predicted else 0.0
        allowed = max(_unseen_bytes(plan.program), _TOLERANCE[self.code.device] * predicted)
        if abs(gauge.above_bytes - predicted) > allowed:
            warnings.warn(
                f"the step took {format_bytes(gauge.above_bytes)} above its start, {format_percent(error)} off the "
                f"predicted {format_bytes(predicted)}; the budget holds",
                stacklevel=users_level(),
            )

    def _learn_unsplit(self, gauge: StepGauge) -> None:
        beyond = gauge.above_bytes - self.plan.timeline.above_bytes
        if (requested := gauge.requested_above_bytes) is not None:
            beyond = min(beyond, gauge.above_bytes - requested)  # else an op takes more than it is priced at
        most = most_unsplit_bytes(self.plan.program)
        self.measured.unsplit_bytes = max(self.measured.unsplit_bytes, min(beyond, most))

    def _exceeded(self, peak: int) -> BudgetExceeded:
        plan = self.plan
        where = plan.schedule.actions[plan.timeline.peak_action]
        op = plan.program.ops[where.op] if isinstance(where, Compute) else "the boundary"
        return BudgetExceeded(
            f"the step took {format_bytes(peak)}, its budget is {format_allowed(plan.budget_bytes)}, the plan "
            f"predicted {format_bytes(plan.predicted_peak_bytes)} at {op}; "
            "delete Ebbtide's cost cache and report the op if it happens again",
            budget_bytes=plan.budget_bytes,
            measured_peak_bytes=peak,
            op=str(op),
        )


def left_bytes(plan: Plan) -> int:
    """What a step under ``plan`` keeps while it is pending, or by the gradients that its backward has made since."""
    program = plan.program
    return max(plan.boundary_bytes, sum(program.buffers[b].bytes for b in program.gradients))


def executable_numbered(number: int) -> Executable:
    """The executable of a step handle. It is alive as long as a forward of it is, or a step has it."""
    return _alive[number]


def executable_of(
    captured: Captured,
    plan: Plan,
    validity: Validity,
    *,
    device: str,
    verify: bool | Literal["always"],
    tiers: Mapping[str, TransferPath],
    layouts: TangentLayouts,
    replaced: Sequence[Replaced] = (),
) -> Executable:
    """``plan`` for ``captured``, lowered and proven.

    Args:
        captured: the step.
        plan: for it.
        validity: what the plan rests on.
        device: ``"cpu"`` or ``"cuda"``.
        verify: whether its first step is proven and a later one measured; ``"always"``: every one is proven.
        tiers: by name, those that the plan may move buffers to.
        layouts: in which gradients of its outputs are expected.
        replaced: what ops of the plan's rewrites stand for.

    Raises:
        ProofError: if the graphs are not the program.
    """
    lowered = lowered_and_proven(captured, plan)
    first_runs = FirstRuns(always=verify == "always")
    if verify:
        workspace = functools.partial(known_workspace, device=device)
        actions, timeline = plan.schedule.actions, plan.timeline
        held = held_ops(replaced, captured, actions, timeline, lambda: first_runs.free_bytes, workspace)
        first_runs.check(captured, lowered, held)
    return Executable(
        plan=plan,
        validity=validity,
        code=code_of(captured, lowered, plan.schedule, device=device, tiers=tiers),
        first_runs=first_runs,
        measured=Measured(unsplit_bytes=unsplit_bytes(plan.program) if device == "cuda" else 0),
        layouts=layouts,
    )


def _unseen_bytes(program: Program) -> int:
    """What lies between the two windows of a measurement: tangents, a loss outside, outputs that user code drops.

    At the least a few scalars: whether one of them is still there when a window begins is up to the caller's frames.
    """
    unseen = max(program.between_bytes, program.late_bytes)
    if unseen > SCALARS_BYTES:
        unseen += program.returned_bytes
    # Room for what an op of a rewrite takes in some steps only.
    more = max((op.workspace_bytes for op in program.ops if traits_of_op(op.target).may_take_more), default=0)
    # Some optimizers take more in some steps than in others, and an update has room for the most.
    updates = max((op.workspace_bytes for op in program.ops if op.target.startswith(PREFIX)), default=0)
    return max(unseen + more + updates, SCALARS_BYTES)

"""One plan for a captured step, as it runs: its two generated callables, with their proof and their measurement.

1. ``PLANNED``: lowered, statically proven to be the program (``lower.proof``), and not run yet.
2. ``PROVING``: in the first step that is alone with its plan, every buffer that comes back is held against its
   fingerprint (``lower.fingerprints``).
3. ``MEASURING``: in the next undisturbed step, allocations are recorded and the peak is held against prediction and
   budget.
4. ``STEADY``: the generated code alone.

5. Where every step is to be proven, it stays ``PROVING``, and the first undisturbed step is measured besides.

A step whose first forward has not been planned is ``CAPTURED``. Without verification ``PLANNED`` is followed by
``STEADY``.
"""

from __future__ import annotations

import enum
import functools
import itertools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.cost.attach import known_workspace
from ebbtide.engine.hook_order import gradient_order
from ebbtide.engine.reserve import most_unsplit_bytes, unsplit_bytes
from ebbtide.engine.retained import Retained, retained_above_bytes
from ebbtide.engine.unused import UnusedOutputs
from ebbtide.errors import BudgetExceeded
from ebbtide.faults import users_level
from ebbtide.lower.compared import Holding, held_ops, with_holding
from ebbtide.lower.fingerprints import Fingerprints, with_fingerprints
from ebbtide.lower.lowering import Lowered, lower
from ebbtide.lower.proof import prove
from ebbtide.measurement.peak import StepGauge
from ebbtide.measurement.reserved import Reserved
from ebbtide.optimizer.in_step.gradient_recompute import likes_in
from ebbtide.optimizer.in_step.updates import PREFIX, updates_in
from ebbtide.planning.step_end import SCALARS_BYTES
from ebbtide.report.plan import Plan
from ebbtide.rewrites.replaced import Replaced
from ebbtide.step.op_traits import traits_of_op
from ebbtide.step.program import Program
from ebbtide.step.schedule import Boundary, Compute, Free
from ebbtide.step.simulate import simulate
from ebbtide.torch_seams.graphs import boxed_codegen
from ebbtide.transfers.arena import Arena
from ebbtide.transfers.traffic import Traffic
from ebbtide.transfers.ways import Way
from ebbtide.units import format_bytes, format_percent

__all__ = ["Callables", "Executable", "Phase", "executable_numbered"]

# A measured peak that is further from the prediction than this is worth a word (DESIGN: 0.1 % on CPU, 1 % on CUDA).
_TOLERANCE = {"cpu": 0.001, "cuda": 0.01}

_numbers = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, Executable] = weakref.WeakValueDictionary()


class Phase(enum.Enum):
    """Where a step is; the value says what happens next."""

    CAPTURED = "captured: its first forward has not been planned"
    PLANNED = "planned: its graphs are proven to be the program, and have not run"
    PROVING = "proving: what comes back is held against its fingerprints"
    MEASURING = "measuring: the next undisturbed step's peak is recorded"
    STEADY = "steady: the generated code runs alone"


@dataclass(frozen=True, slots=True)
class Callables:
    """Forward and backward as they run: each takes one list of arguments and empties it."""

    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any]


class Executable:
    """A plan for a captured step, lowered and proven.

    Args:
        captured: the step.
        plan: for it.
        device: ``"cpu"`` or ``"cuda"``.
        verify: whether its first step is proven and a later one measured; ``"always"``: every one is proven.
        tiers: by name, those that the plan moves buffers to.
        replaced: what ops of the plan's rewrites stand for.

    Attributes:
        number: names it, in tickets.
        device: ``"cpu"`` or ``"cuda"``.
        needs_bytes: above the step's start, as the plan predicts.
        leaves_bytes: kept while its flight is in the air, or by the gradients that its backward has made since.
        unsplit_bytes: kept free in every step for what the card's allocator hands out beyond what it is asked for
            (``reserve.unsplit_bytes``); more where a measured step has shown that.
        accumulates: whether it is for a step of which all gradients are added to others.
        updates: of a step with the optimizer in it, names of the parameters that it updates, by position among the
            primals; and where they are among the tensors that go in.
        serves: whether calls whose backward updates (``Circumstances.updates``), those of which none does, or both.
        settings: of the optimizer, with which its updates were priced (``Inside.settings``); empty without one.
        rehearsed: whether such a step has been proven without updating anything.
        provisional: whether it was planned for the least memory because something was not known yet.
        asked: how often the model had been asked for another budget or optimizer when it was planned.
        gradient_order: per tensor that goes in, when its gradient reaches it (``hook_order``).
        unused: drops gradients that no used output depends on.
        default_dtype: what its forward runs under, and what runs again in its backward: an integer divided by a number
            has it, and so has what is made without a type of its own.
        always: whether every step is proven.
        phase: definitions 1 to 5.
        proving: number of the flight that is being proven, or ``None``.
        verified_buffers: how many came back with their bits in the proven step.
        rewrites_held: how many ops of rewrites were checked by what in it (``lower.compared``).
        measured_above_bytes: of the measured step; ``None`` before.
        reserved: what the card's allocator held in it; ``None`` before, and on CPU.
        traffic: what moved in the last step that ended, on CUDA in the last one that was measured; ``None`` before, and
            where nothing moves.
    """

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        *,
        device: str,
        verify: bool | Literal["always"],
        tiers: Mapping[str, Way] | None = None,
        replaced: Sequence[Replaced] = (),
    ) -> None:
        self.number = next(_numbers)
        self.phase = Phase.PLANNED
        self.proving: int | None = None
        self.accumulates = False
        self.unsplit_bytes = unsplit_bytes(plan.program) if device == "cuda" else 0
        self.provisional = False
        self.asked = 0
        self.serves: set[bool] = set()
        self.settings: tuple[object, ...] = ()
        self.rehearsed = False
        self.updates = {each.position: each.parameter for each in updates_in(captured).values()}
        tensors = [i for i, node in enumerate(captured.primals) if isinstance(node.meta.get("val"), torch.Tensor)]
        self.entries = {position: tensors.index(position) for position in self.updates}
        self._tangents = [node.meta["val"] for node in captured.tangents]
        self.verified_buffers = 0
        self.rewrites_held: dict[str, int] = {}
        self._holding: list[Holding] = []
        self.measured_above_bytes: int | None = None
        self.reserved: Reserved | None = None
        self.device = device
        self._verify = verify
        self.always = verify == "always"
        self.default_dtype = torch.get_default_dtype()
        self._output_count = captured.forward_output_count
        lowered = lower(captured, plan.schedule, None if plan.machine is None else plan.machine.links)
        prove(captured, lowered)
        self._slots = lowered.slots
        self._tiers = tiers or {}
        self.traffic: Traffic | None = None
        self.fingerprints: Fingerprints | None = None
        self.checked: Callables | None = None
        if verify:
            self.fingerprints = Fingerprints(captured.program, likes_in(captured))
            graphs = with_fingerprints(lowered.forward, lowered.backward, self.fingerprints)
            self._holding = [*self._held(captured, plan, replaced)]
            with_holding(graphs, self._holding)
            self.checked = _callables(*graphs)
        self.unused = UnusedOutputs(captured)
        self.gradient_order = gradient_order(captured)
        self.plain = _callables(*_graphs(lowered))
        self.adopt(plan)
        _alive[self.number] = self

    def _held(self, captured: Captured, plan: Plan, replaced: Sequence[Replaced]) -> Iterator[Holding]:
        """The ops of rewrites, each to be held where the plan that is current by then has room for it."""

        def room() -> int:
            return self.plan.budget_bytes - self.plan.resident_bytes - self.plan.reserve_bytes

        workspace = functools.partial(known_workspace, device=self.device)
        return held_ops(replaced, captured, plan.schedule.actions, plan.timeline, room, workspace)

    def adopt(self, plan: Plan) -> None:
        """Run for ``plan`` from now on, which has the same schedule: what is resident or the budget has changed."""
        self.plan = plan
        self.needs_bytes = plan.timeline.above_bytes
        program = plan.program
        self.boundary_bytes = plan.boundary_bytes
        self.leaves_bytes = max(self.boundary_bytes, sum(program.buffers[b].bytes for b in program.gradients))
        known = (program.between_bytes, program.held_bytes, None)
        self._needs: dict[tuple[int, int, Retained | None], int] = {known: self.needs_bytes}
        self.overhead = plan.overhead

    def needs_with(self, between_bytes: int, held_bytes: int, retained: Retained | None = None) -> int:
        """Bytes above the step's start if user code takes so much between the two graphs, or retains the second."""
        key = (between_bytes, held_bytes, retained)
        if key not in self._needs:
            schedule = self.plan.schedule
            program = replace(self.plan.program, between_bytes=between_bytes, held_bytes=held_bytes)
            timeline = simulate(program, schedule, self.plan.machine)
            self._needs[key] = (
                timeline.above_bytes
                if retained is None
                else retained_above_bytes(program, schedule, timeline, retained)
            )
        return self._needs[key]

    @property
    def moves(self) -> bool:
        """Whether it moves buffers to other tiers."""
        return bool(self._slots)

    def arena(self, flight: int, timed: bool = False) -> Arena | None:
        """An arena for a flight that is about to start, if it needs one; ``timed`` if the flight is measured.

        Raises:
            TierError: if a tier has no room; nothing of the step has run.
        """
        return Arena(self._slots, self._tiers, flight, timed) if self._slots else None

    def moved(self, traffic: Traffic) -> None:
        """A backward has ended. Seconds, once known, stay until others are: every step moves the same bytes."""
        if traffic.timed or self.traffic is None:
            traffic.read_clocks()
            self.traffic = traffic

    def rehearsal_tangents(self) -> list[torch.Tensor]:
        """Tangents as of a loss that ``backward()`` is called on: ones."""
        return [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device).fill_(1)
            for each in self._tangents
        ]

    @property
    def output_count(self) -> int:
        """How many of the forward's results are the step's own; the rest is saved."""
        return self._output_count

    def start(self) -> None:
        """The first forward is about to run."""
        if self.phase is Phase.PLANNED:
            self.phase = Phase.PROVING if self._verify else Phase.STEADY

    def proven(self) -> None:
        """A whole step's buffers came back with their bits."""
        assert self.fingerprints is not None
        self.verified_buffers = self.fingerprints.checked
        self.rewrites_held = dict(Counter(each.how.value for each in self._holding if each.how is not None))
        self.proving = None
        if self.always:
            return
        self._holding = []
        self.phase = Phase.MEASURING
        self.checked = self.fingerprints = None

    def measured(self, gauge: StepGauge) -> None:
        """Hold a step's peak against budget and prediction.

        Raises:
            BudgetExceeded: if it went over the budget.
        """
        plan = self.plan
        if not self.always:
            self.phase = Phase.STEADY
        self.measured_above_bytes = gauge.above_bytes
        peak = plan.resident_bytes + gauge.above_bytes
        where = plan.schedule.actions[plan.timeline.peak_action]
        op = plan.program.ops[where.op] if isinstance(where, Compute) else "the boundary"
        if self.device == "cuda":
            beyond = gauge.above_bytes - plan.timeline.above_bytes
            if (requested := gauge.requested_above_bytes) is not None:
                beyond = min(beyond, gauge.above_bytes - requested)  # else an op takes more than it is priced at
            self.unsplit_bytes = max(self.unsplit_bytes, min(beyond, most_unsplit_bytes(plan.program)))
        if self.plan.budget_bytes < peak <= plan.predicted_peak_bytes + self.unsplit_bytes:
            warnings.warn(
                f"the step took {format_bytes(peak)}, its budget is {format_bytes(plan.budget_bytes)}: the allocator "
                f"handed out {format_bytes(peak - plan.predicted_peak_bytes)} more than it was asked for. That is kept "
                "free from the next step on. Start the process with PYTORCH_ALLOC_CONF=expandable_segments:True, and "
                "it hands out what it is asked for",
                stacklevel=users_level(),
            )
        elif peak > plan.budget_bytes:
            raise BudgetExceeded(
                f"the step took {format_bytes(peak)}, its budget is {format_bytes(plan.budget_bytes)}, the plan "
                f"predicted {format_bytes(plan.predicted_peak_bytes)} at {op}; "
                "delete Ebbtide's cost cache and report the op if it happens again",
                budget_bytes=plan.budget_bytes,
                measured_peak_bytes=peak,
                op=str(op),
            )
        self.reserved = gauge.reserved
        if gauge.reserved is not None and (advice := gauge.reserved.advice(plan.budget_bytes)):
            warnings.warn(advice, stacklevel=users_level())
        predicted = plan.timeline.above_bytes
        error = gauge.above_bytes / predicted - 1 if predicted else 0.0
        if abs(gauge.above_bytes - predicted) > max(_unseen_bytes(plan.program), _TOLERANCE[self.device] * predicted):
            warnings.warn(
                f"the step took {format_bytes(gauge.above_bytes)} above its start, {format_percent(error)} off the "
                f"predicted {format_bytes(predicted)}; the budget holds",
                stacklevel=users_level(),
            )

    @property
    def left_behind_bytes(self) -> int:
        """Bytes of new values that go once copied back: mutations, and those that no backward op reads."""
        program, actions = self.plan.program, self.plan.schedule.actions
        freed = {a.buffer for a in actions[: actions.index(Boundary())] if isinstance(a, Free)}
        return sum(program.buffers[b].bytes for b in program.copied_back.intersection(freed.union(program.mutations)))


def executable_numbered(number: int) -> Executable:
    """The executable of a ticket. It is alive as long as a forward of it is, or a step has it."""
    return _alive[number]


def _unseen_bytes(program: Program) -> int:
    """What lies between the two windows of a measurement: tangents, a loss outside, outputs that user code drops.

    At the least a few scalars: whether one of them is still there when a window begins is up to the caller's frames.
    """
    unseen = max(program.between_bytes, program.late_bytes)
    if unseen > SCALARS_BYTES:
        unseen += sum(program.buffers[b].bytes for b in program.forward_outputs)
    # Room for what an op of a rewrite takes in some steps only.
    more = max((op.workspace_bytes for op in program.ops if traits_of_op(op.target).may_take_more), default=0)
    # Some optimizers take more in some steps than in others, and an update has room for the most.
    updates = max((op.workspace_bytes for op in program.ops if op.target.startswith(PREFIX)), default=0)
    return max(unseen + more + updates, SCALARS_BYTES)


def _graphs(lowered: Lowered) -> tuple[fx.GraphModule, fx.GraphModule]:
    return lowered.forward, lowered.backward


def _callables(*graphs: fx.GraphModule) -> Callables:
    """The graphs' generated code, which takes its arguments as one list and empties it: no frame keeps them."""
    for module in graphs:
        boxed_codegen(module)
    forward, backward = graphs
    return Callables(forward.forward, backward.forward)

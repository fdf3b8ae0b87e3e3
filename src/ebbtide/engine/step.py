"""One captured step of a model: the plans that it has, as they run, one of them current.

A plan is replaced without a new capture. Plans that were current stay at hand, the best that holds is taken, so what
comes and goes (gradients that are accumulated and cleared) costs a search once each. The same schedule is lowered and
proven once.

While gradients are accumulated, a step that copies its gradients (``capture.rules.gradient_copies``) is another one,
which does not and needs less. A plan with the copies will do then too, if it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from ebbtide.capture.joint import Captured
from ebbtide.capture.layouts import Layouts
from ebbtide.engine.call_context import CallContext
from ebbtide.engine.compiled import Capture
from ebbtide.engine.executable import Executable, executable_of
from ebbtide.engine.first_runs import Phase
from ebbtide.engine.pending_steps import pending_steps_of
from ebbtide.engine.piece import Piece
from ebbtide.engine.tangent_layouts import TangentLayouts
from ebbtide.engine.validity import Demand, Validity
from ebbtide.measurement.reserved import Reserved
from ebbtide.optimizer.in_step.optimizer_in_backward import OptimizerInBackward
from ebbtide.report.plan import Plan
from ebbtide.rewrites.choices import apply_held, apply_proven
from ebbtide.transfers.paths import TransferPath
from ebbtide.transfers.traffic import Traffic
from ebbtide.units import format_allowed, format_bytes, format_count

__all__ = ["Step"]

_MOST_EXECUTABLES = 6  # of one step; a forward in flight keeps its own alive besides


class Step:
    """One input signature of one model.

    Args:
        capture: that serves it, of its own or shared with other shapes.
        verify: whether first steps are proven and later ones measured, or every step proven.
        tiers: by name, those that plans may move buffers to.

    Attributes:
        piece: its captured graph.
        executable: what ran last; ``None`` before the first plan.
        forward_calls: how many forwards ran.
        optimizer_traffic: of the optimizer's state, what has moved since it left last; ``None`` if it does not move.
    """

    def __init__(
        self, capture: Capture, *, verify: bool | Literal["always"], tiers: Mapping[str, TransferPath] | None = None
    ) -> None:
        self.piece = Piece(capture)
        self.executable: Executable | None = None
        self.forward_calls = 0
        self.optimizer_traffic: Traffic | None = None
        self._verify: bool | Literal["always"] = verify
        self._tiers = tiers or {}
        self._executables: list[Executable] = []  # used last comes last
        self._planned_for: int | None = None  # the number of the request that it was planned for last

    def __repr__(self) -> str:
        if (plan := self.plan) is None:
            return "<Step without a plan>"
        above = self.measured_above_bytes
        measured = "not measured" if above is None else f"measured {format_bytes(plan.resident_bytes + above)}"
        return (
            f"<Step of {plan.case}, {self.phase.name.lower()}: planned {format_bytes(plan.predicted_peak_bytes)} of "
            f"{format_allowed(plan.budget_bytes)}, {measured}, "
            f"{format_count(self.verified_buffers, 'buffer')} verified"
            f"{''.join(f', {count} rewritten {how}' for how, count in self.rewrites_held.items())}>"
        )

    # -- what runs ----------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where it is on the way from captured to steady."""
        return Phase.CAPTURED if self.executable is None else self.executable.first_runs.phase

    @property
    def plan(self) -> Plan | None:
        """The plan that runs; ``None`` before the first."""
        return None if self.executable is None else self.executable.plan

    @property
    def verified_buffers(self) -> int:
        """How many buffers came back with their bits in the proven step of the plan that runs."""
        return 0 if self.executable is None else self.executable.first_runs.verified_buffers

    @property
    def rewrites_held(self) -> Mapping[str, int]:
        """How ops of rewrites were checked in the proven step of the plan that runs, and how many of them.

        ``"held against the captured ops"``: these ran beside them on the same numbers, and every result had the same
        bits. ``"held in samples"``: there was room for the largest of these alone. ``"on measured facts"``: there was
        no room, and all that is known is what was measured of the kernels on made-up numbers.
        """
        return {} if self.executable is None else self.executable.first_runs.rewrites_held

    @property
    def measured_above_bytes(self) -> int | None:
        """The measured peak above the step's start under the plan that runs; ``None`` before it is measured."""
        return None if self.executable is None else self.executable.measured.above_bytes

    @property
    def reserved(self) -> Reserved | None:
        """What the card's allocator held at the most in the measured step; ``None`` before, and on CPU."""
        return None if self.executable is None else self.executable.measured.reserved

    @property
    def traffic(self) -> Traffic | None:
        """What moved in the last step that ended; ``None`` before, and where nothing moves."""
        return None if self.executable is None else self.executable.measured.traffic

    # -- its plans ----------------------------------------------------------------------------------------------

    @property
    def executables(self) -> list[Executable]:
        """All that are at hand, what ran last coming last."""
        return self._executables

    def plans(self) -> Iterator[Plan]:
        """The plans at hand."""
        return (each.plan for each in self._executables)

    def resident_bytes(self, now: CallContext) -> int:
        """What is resident before a call of it; the allocator of a card has its hidden inputs."""
        return now.resident_bytes + (self.piece.hidden_bytes(now.reached) if now.device == "cpu" else 0)

    def of_checkpoint(self, now: CallContext) -> Executable | None:
        """What a call inside of somebody's checkpoint has to run, if one of its forwards is in flight.

        A checkpoint compares what a repeated forward saves with what the first one did, so while that is in flight
        under saved-tensor hooks, its plan stays, for calls under hooks. Its backward cannot be told which forward it
        belongs to, so no plan that moves buffers holds there.
        """
        if now.checkpointed:
            for each in reversed(self._executables):
                hooked = [pending.executable for pending in pending_steps_of(each) if pending.hooked]
                if hooked:
                    return hooked[0]
        return None

    def holding(self, demand: Demand) -> Executable | None:
        """The plan of least overhead among those that hold for a call; ``None`` if none does."""
        fitting = [each for each in self._executables if each.differs(demand) is None]
        return min(fitting, key=lambda each: each.overhead) if fitting else None

    def why_none_holds(self, demand: Demand) -> str:
        """What the plan that ran last lacks for a call, for people; no plan holds for it."""
        if not self._executables:
            since = "" if self._planned_for is None else demand.request.changed_since(self._planned_for)
            return since or "no plan was found for it before"
        return self._executables[-1].differs(demand) or "its plan has been forgotten"

    def executable_for(
        self, captured: Captured, plan: Plan, validity: Validity, *, in_backward: OptimizerInBackward | None = None
    ) -> Executable:
        """``plan`` for ``captured``, or for what its rewrites and updates make of that, lowered and proven.

        What has its schedule already is not made again.
        """
        self._planned_for = validity.request
        for each in self._executables:
            same = each.plan.schedule == plan.schedule and each.plan.program == plan.program
            if same and each.validity.layouts == validity.layouts:
                return each.rests_on(plan, validity)
        rewritten, replaced = captured, []
        if plan.rewritten is not None:
            rewritten, replaced = apply_proven(captured, plan.rewritten.rewrites)
        if in_backward is not None:
            rewritten = in_backward.with_updates(rewritten)
        accumulating, piece = self.piece.accumulates(captured), self.piece

        def traced_again(layouts: Layouts) -> Captured:
            again = piece.captured_for(layouts, accumulating=accumulating)
            again = again if in_backward is None else in_backward.with_norms(again)
            if plan.rewritten is not None:
                again = apply_held(again, plan.rewritten.rewrites, piece.capture.device)
            return again if in_backward is None else in_backward.with_updates(again)

        return executable_of(
            rewritten,
            plan,
            validity,
            device=self.piece.capture.device,
            verify=self._verify,
            tiers=self._tiers,
            layouts=TangentLayouts(
                first=piece.traced_tangents,
                device=piece.capture.device,
                captured=rewritten,
                plan=plan,
                traced_again=traced_again,
                learn=piece.learn_layouts,
            ),
            replaced=replaced,
        )

    def ran(self, executable: Executable) -> None:
        """Note that a forward ran under ``executable``."""
        self.forward_calls += 1
        if self.executable is executable:
            return
        self.executable = executable
        same = (executable.code, executable.validity)
        self._executables = [each for each in self._executables if (each.code, each.validity) != same]
        self._executables.append(executable)
        del self._executables[:-_MOST_EXECUTABLES]

    def offer(self, executable: Executable) -> None:
        """Have a plan at hand that has not run: the next call takes it if it is the best that holds."""
        same = (executable.code, executable.validity)
        others = [each for each in self._executables if (each.code, each.validity) != same]
        self._executables = [executable, *others][:_MOST_EXECUTABLES]

    def forget_plans(self) -> None:
        """Plan anew at the next call: what was asked for has changed."""
        self._executables.clear()
        self.executable = None

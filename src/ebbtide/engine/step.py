"""One captured step of a model: its plans as they run, one of them current.

A plan is replaced without a new capture. Plans that were current stay at hand, the best that holds is taken, so
circumstances that come and go (gradients that are accumulated and cleared) cost a search once each. The same schedule
is lowered and proven once.

While gradients are accumulated, a step that copies its gradients (``capture.rules.gradient_copies``) is another one,
which does not and needs less. A plan with the copies will do then too, if it holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from ebbtide.capture.joint import Captured
from ebbtide.engine.compiled import Call, Capture
from ebbtide.engine.executable import Executable, Phase
from ebbtide.measurement.reserved import Reserved
from ebbtide.measurement.resident import hidden_in, storages_in
from ebbtide.optimizer.in_step.optimizer_in_backward import OptimizerInBackward
from ebbtide.report.plan import Plan
from ebbtide.rewrites.choices import apply_proven
from ebbtide.transfers.traffic import Traffic
from ebbtide.transfers.ways import Way
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
        captured: the step as a value; ``None`` before its first call.
        executable: what ran last; ``None`` before the first plan.
        forward_calls: how many forwards ran.
        hidden: its inputs that no walk over model and arguments finds.
        optimizer_traffic: of the optimizer's state, what has moved since it left last; ``None`` if it does not move.
        cramped: whether its capture had no room to ask kernels how they lay out their results.
        accumulated: primals whose gradients are copied, unless all of the model's parameters have gradients.
    """

    def __init__(
        self, capture: Capture, *, verify: bool | Literal["always"], tiers: Mapping[str, Way] | None = None
    ) -> None:
        self.capture = capture
        self.captured: Captured | None = None
        self.executable: Executable | None = None
        self.forward_calls = 0
        self.hidden: list[weakref.ref[torch.Tensor]] = []
        self.optimizer_traffic: Traffic | None = None
        self.cramped = False
        self._changed_buffers: list[str] = []
        self._changed_others: list[weakref.ref[torch.Tensor]] = []
        self.accumulated: frozenset[int] = frozenset()
        self._accumulating: Captured | None = None
        self._verify: bool | Literal["always"] = verify
        self._tiers = tiers or {}
        self._executables: list[Executable] = []  # used last comes last

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

    @property
    def phase(self) -> Phase:
        """Where it is on the way from captured to steady."""
        return Phase.CAPTURED if self.executable is None else self.executable.phase

    @property
    def plan(self) -> Plan | None:
        """The plan that runs; ``None`` before the first."""
        return None if self.executable is None else self.executable.plan

    @property
    def verified_buffers(self) -> int:
        """How many buffers came back with their bits in the proven step of the plan that runs."""
        return 0 if self.executable is None else self.executable.verified_buffers

    @property
    def rewrites_held(self) -> Mapping[str, int]:
        """How ops of rewrites were checked in the proven step of the plan that runs, and how many of them.

        ``"held against the captured ops"``: these ran beside them on the same numbers, and every result had the same
        bits. ``"held in samples"``: there was room for the largest of these alone. ``"on measured facts"``: there was
        no room, and all that is known is what was measured of the kernels on made-up numbers.
        """
        return {} if self.executable is None else self.executable.rewrites_held

    @property
    def measured_above_bytes(self) -> int | None:
        """The measured peak above the step's start under the plan that runs; ``None`` before it is measured."""
        return None if self.executable is None else self.executable.measured_above_bytes

    @property
    def reserved(self) -> Reserved | None:
        """What the card's allocator held at the most in the measured step; ``None`` before, and on CPU."""
        return None if self.executable is None else self.executable.reserved

    @property
    def traffic(self) -> Traffic | None:
        """What moved in the last step that ended; ``None`` before, and where nothing moves."""
        return None if self.executable is None else self.executable.traffic

    @property
    def executables(self) -> list[Executable]:
        """All that are at hand, what ran last coming last."""
        return self._executables

    def plans(self) -> Iterator[Plan]:
        """The plans at hand."""
        return (each.plan for each in self._executables)

    def look_at_inputs(self, inputs: Sequence[object], call: Call) -> None:
        """Find out what the captured step's inputs are; they are those of ``call``."""
        self.hidden = hidden_in(inputs, call.module, (call.args, call.kwargs))
        assert self.captured is not None
        parameters = {id(each): name for name, each in call.module.named_parameters()}
        self.captured = replace(self.captured, parameters=tuple(parameters.get(id(each), "") for each in inputs))
        names = {id(each): name for name, each in call.module.named_buffers()}
        changed = [
            value for node, value in zip(self.captured.primals, inputs, strict=True) if node in self.captured.mutated
        ]
        self._changed_buffers = [names[id(each)] for each in changed if id(each) in names]
        self._changed_others = [
            weakref.ref(each) for each in changed if isinstance(each, torch.Tensor) and id(each) not in names
        ]
        if copied := self.captured.copied_gradients:
            own = {id(each) for each in call.module.parameters()}
            self.accumulated = frozenset(i for i in copied if id(inputs[i]) in own)

    def changed_in(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """What the step changes: buffers of ``module``, and inputs that are none."""
        others = [reference() for reference in self._changed_others]
        return [*map(module.get_buffer, self._changed_buffers), *(each for each in others if each is not None)]

    def captured_for(self, *, accumulating: bool) -> Captured:
        """The step as a value, where the model's parameters have gradients or not."""
        assert self.captured is not None
        if not (accumulating and self.accumulated):
            return self.captured
        if self._accumulating is None:
            self._accumulating = self.capture.accumulating(self.captured, self.accumulated)
        return self._accumulating

    def made_for(self, captured: Captured, plan: Plan, inside: OptimizerInBackward | None = None) -> Executable:
        """``plan`` for ``captured``, or for what its rewrites and updates make of that, lowered and proven.

        What has its schedule already is not made again.
        """
        for each in self._executables:
            if each.plan.schedule == plan.schedule and each.plan.program == plan.program:
                each.adopt(plan)
                return each
        step, replaced = captured, []
        if plan.rewritten is not None:
            step, replaced = apply_proven(captured, plan.rewritten.rewrites)
        if inside is not None:
            step = inside.inside(step)
        executable = Executable(
            step, plan, device=self.capture.device, verify=self._verify, tiers=self._tiers, replaced=replaced
        )
        executable.accumulates = captured is self._accumulating
        return executable

    def ran(self, executable: Executable) -> None:
        """A forward ran under ``executable``."""
        self.forward_calls += 1
        if self.executable is executable:
            return
        self.executable = executable
        if executable in self._executables:
            self._executables.remove(executable)
        self._executables.append(executable)
        del self._executables[:-_MOST_EXECUTABLES]

    @property
    def hidden_inputs(self) -> list[torch.Tensor]:
        """Those of ``hidden`` that live."""
        return [each for each in (reference() for reference in self.hidden) if each is not None]

    def hidden_bytes(self, reached: Container[int]) -> int:
        """Bytes of ``hidden`` and of their gradients, without the storages that have been ``reached`` by now."""
        if not self.hidden:
            return 0
        return sum(size for key, size in storages_in(self.hidden_inputs).items() if key not in reached)

    def forget_plans(self) -> None:
        """Plan anew at the next call: what was asked for has changed."""
        self._executables.clear()
        self.executable = None

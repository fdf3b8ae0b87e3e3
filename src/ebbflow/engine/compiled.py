"""A planned step that can be called: capture at the first call, the generated graphs ever after."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ebbflow.capture.joint import Joint
from ebbflow.capture.loss import guarded
from ebbflow.capture.trace import compile_step, forget_step, translated_errors
from ebbflow.cost.cache import device_context
from ebbflow.engine.shared import SharedCapture
from ebbflow.engine.step import PlannedStep
from ebbflow.errors import CaptureError
from ebbflow.step.plan import Plan

__all__ = ["ALLOCATOR_GRANULARITY_BYTES", "CompiledStep", "StaleCapture"]

# c10's CUDA allocator hands out multiples of 512 bytes (kMinBlockSize); the CPU's reports what was asked for.
ALLOCATOR_GRANULARITY_BYTES = {"cpu": 1, "cuda": 512}


class StaleCapture(CaptureError):
    """The model is not what was captured: an attribute, a mode or a flag that the step depends on has changed."""


class CompiledStep:
    """One input signature of one model: its step and the compiled function that runs it.

    Args:
        planner: from a joint graph to the plan to run; called at the first call, before anything of the model runs.
        name: of the case.
        device: ``"cpu"`` or ``"cuda"``.
        verify: whether the first step is proven and a later one measured.
        every_output: whether outputs beside a scalar loss take gradients too.
        between: told what user code takes between the two graphs, where the loss is outside (``BetweenGauge``).
        flights: bytes that forwards keep whose backward has not come; shared by all steps of a model.
        shared: a symbolic capture that serves this signature too; ``None`` for a capture of its own.
    """

    def __init__(
        self,
        planner: Callable[[Joint], Plan],
        *,
        name: str,
        device: str,
        verify: bool,
        every_output: bool = False,
        between: Callable[[int, int], None] | None = None,
        flights: dict[int, int] | None = None,
        shared: SharedCapture | None = None,
    ) -> None:
        self.step = PlannedStep(
            planner,
            name=name,
            device=device,
            granularity_bytes=ALLOCATOR_GRANULARITY_BYTES[device],
            context=device_context(device),
            verify=verify,
            between=between,
            flights=flights if flights is not None else {},
        )
        self._every_output = every_output
        self.shared = shared
        self._captured = False
        if shared is None:
            self._compiled = compile_step(self.step)
            weakref.finalize(self, forget_step, self._compiled).atexit = False
        else:
            self._compiled = shared.running(self.step)

    @property
    def plan(self) -> Plan | None:
        """The plan that runs; ``None`` before the first call."""
        return self.step.plan

    def __call__(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run ``forward(module, *args, **kwargs)`` as planned.

        Raises:
            CaptureError: if it is not one graph, or if the planned graphs were not what ran.
            BudgetError: if no schedule fits.
            StaleCapture: if the model has changed since the first call; nothing has run.
        """
        calls = self.step.forward_calls
        self.step.before_forward(module)
        try:
            if self._captured or (self.shared is not None and self.shared.captured):
                # The step holds one program: Dynamo must not compile another one into it behind our back.
                with torch.compiler.set_stance("fail_on_recompile"):
                    outputs, detached = self._compiled(module, forward, args, kwargs, self._every_output)
            else:
                with translated_errors(module, forward, args, kwargs, runnable=True):
                    outputs, detached = self._compiled(module, forward, args, kwargs, self._every_output)
                self._captured = True
                if self.shared is not None:
                    self.shared.captured = True
        except BaseException as error:
            self.step.abandon()
            if self.step.forward_calls == calls and "fail_on_recompile" in str(error):
                raise StaleCapture(f"the model has changed since its step was captured: {error}") from None
            raise
        if self.step.forward_calls != calls + 1:
            raise CaptureError("the planned step did not run: this torch build bypassed the compiled function")
        self.step.after_forward(outputs)
        return guarded(outputs, detached)

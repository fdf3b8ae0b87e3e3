"""One planned step as it runs: the two generated callables, the first step's proof, the second step's measurement.

1. In the first step every buffer that comes back is held against its fingerprint (``lower/fingerprints.py``).
2. In the first step after that, allocations are recorded and the peak is held against prediction and budget.
3. Every other step is the generated code alone.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen
from torch.utils import _pytree as pytree

from ebbflow.capture.joint import Joint, read_joint
from ebbflow.capture.loss_place import loss_is_outside
from ebbflow.errors import BudgetExceeded, VerificationError
from ebbflow.lower.fingerprints import Fingerprints, with_fingerprints
from ebbflow.lower.lowering import Lowered, lower
from ebbflow.lower.proof import prove
from ebbflow.measurement.between import BetweenGauge
from ebbflow.measurement.cpu_allocations import profiler_active
from ebbflow.measurement.peak import StepGauge
from ebbflow.step.plan import Plan
from ebbflow.step.schedule import Boundary, Compute, Free
from ebbflow.units import format_bytes, format_percent

__all__ = ["PlannedStep", "boxed"]

# A measured peak that is further from the prediction than this is worth a word (DESIGN: 0.1 % on CPU, 1 % on CUDA).
_TOLERANCE = {"cpu": 0.001, "cuda": 0.01}


_SCALARS_BYTES = 64  # tangents of a few scalar losses

_flight_numbers = itertools.count()


class PlannedStep:
    """A step under a plan; the :class:`~ebbflow.capture.trace.Partitioner` of its capture.

    Args:
        planner: from a joint graph to the plan to run.
        name: of the case.
        device: ``"cpu"`` or ``"cuda"``.
        granularity_bytes: of the device's allocator.
        context: what the program depends on besides its ops.
        verify: whether the first step is proven and a later one measured.
        between: told what user code takes between the two graphs, where the loss is outside.
        flights: bytes that forwards keep whose backward has not come; shared by all steps of a model.
    """

    def __init__(
        self,
        planner: Callable[[Joint], Plan],
        *,
        name: str,
        device: str,
        granularity_bytes: int,
        context: dict[str, str],
        verify: bool,
        between: Callable[[int, int], None] | None,
        flights: dict[int, int],
    ) -> None:
        self._planner = planner
        self._name = name
        self._device = device
        self._granularity_bytes = granularity_bytes
        self._context = context
        self._lowered: Lowered | None = None
        self._fingerprints: Fingerprints | None = None
        self._gauge: StepGauge | None = None
        self._checked: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._plain: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._snapshot: Callable[[], None] | None = None
        self._flights: set[int] = set()  # forwards whose backward has not come and whose graph is alive
        self._bytes_in_flight = flights
        self._tell_between = between
        self._between: BetweenGauge | None = None
        self._doubled = False  # whether this very step is in flight already
        self._overlapped = False  # whether any step of the model is
        self._to_verify = verify
        self._to_measure = verify
        self.plan: Plan | None = None
        self.forward_calls = 0
        self.verified_buffers = 0
        self.measured_above_bytes: int | None = None

    # -- capture --------------------------------------------------------------------------------------------

    def partition(self, joint: fx.GraphModule, forward_output_count: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Read, plan, lower and prove."""
        read = read_joint(
            joint.graph,
            forward_output_count,
            name=self._name,
            granularity_bytes=self._granularity_bytes,
            context=self._context,
        )
        self.plan = self._planner(read)
        if self._tell_between is not None and loss_is_outside(read):
            self._between = BetweenGauge(self._device, self._tell_between)
        self._lowered = lower(read, self.plan.schedule)
        prove(read, self._lowered)
        for graph in (self._lowered.forward, self._lowered.backward):
            _box(graph)
        self._plain = (self._lowered.forward.forward, self._lowered.backward.forward)
        if self._to_verify:
            self._fingerprints = Fingerprints(read.program)
            checked = with_fingerprints(self._lowered.forward, self._lowered.backward, self._fingerprints)
            for graph in checked:
                _box(graph)
            self._checked = (checked[0].forward, checked[1].forward)
        return self._lowered.forward, self._lowered.backward

    def forward_callable(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Runs the forward."""
        return boxed(self.run_forward)

    def backward_callable(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Runs the backward."""
        return boxed(self.run_backward)

    # -- a step ---------------------------------------------------------------------------------------------

    def before_forward(self, module: torch.nn.Module) -> None:
        """Called right before the forward: remember what a failed verification restores, start a measurement."""
        if self._between is not None:
            self._between.end()
        self._doubled = bool(self._flights)
        self._overlapped = bool(self._bytes_in_flight)
        if self._to_verify:
            self._snapshot = None if self._doubled else _snapshot(module, self._device)
        elif self._to_measure and self._gauge is None and not self._overlapped and not self._measured_elsewhere():
            self._gauge = StepGauge(self._device)

    def after_forward(self, outputs: object) -> None:
        """Called with what the forward returned: this forward is in flight until its backward or its end."""
        node = _own_node(outputs)
        if node is not None:
            flight = next(_flight_numbers)
            self._flights.add(flight)
            assert self.plan is not None
            self._bytes_in_flight[flight] = self.plan.boundary_bytes
            weakref.finalize(node, self._land, flight)
        if self._between is not None and not self._overlapped:
            self._between.begin()

    def _land(self, flight: int) -> None:
        """The backward of a forward in flight has begun, or its graph is gone."""
        self._flights.discard(flight)
        self._bytes_in_flight.pop(flight, None)

    def abandon(self) -> None:
        """The forward raised: what was begun for this step ends here."""
        self._gauge = None
        if self._between is not None:
            self._between.end()

    def run_forward(self, args: list[Any]) -> Any:
        """The forward's outputs, then what the backward gets; empties ``args``."""
        self.forward_calls += 1
        assert self._plain is not None
        if not self._to_verify:
            if self._gauge is None:
                return self._plain[0](args)
            outputs = _gauged(self._gauge, self._plain[0], args)
            assert self.plan is not None
            self._gauge.forget(_left_behind_bytes(self.plan))
            return outputs
        assert self._checked is not None
        assert self._fingerprints is not None
        if self._doubled:
            # Two steps at once would share the buffers' names: neither is proven, a later one is.
            self._fingerprints.cancelled = True
        else:
            self._fingerprints.restart()
        return self._checked[0](args)

    def run_backward(self, args: list[Any]) -> Any:
        """One gradient per primal, of what the forward saved and the tangents; empties ``args``."""
        if len(self._flights) == 1:
            # With several it cannot be told whose backward this is; they end with their graphs.
            self._land(next(iter(self._flights)))
        if self._between is not None:
            self._between.mark()
        assert self._plain is not None
        if self._to_verify:
            return self._verified_backward(args)
        if self._gauge is None:
            return self._plain[1](args)
        if self._overlapped or self._measured_elsewhere():
            self._gauge = None  # this step's figures would be another's as well; a later step is measured
            return self._plain[1](args)
        gradients = _gauged(self._gauge, self._plain[1], args)
        self._finish_measuring()
        return gradients

    def _verified_backward(self, args: list[Any]) -> Any:
        assert self._checked is not None
        assert self._fingerprints is not None
        try:
            gradients = self._checked[1](args)
        except VerificationError:
            if self._snapshot is not None:
                self._snapshot()
            raise
        if not self._fingerprints.cancelled:
            self.verified_buffers = self._fingerprints.checked
            self._to_verify = False
            self._checked = self._fingerprints = self._snapshot = None
        return gradients

    # -- measuring ------------------------------------------------------------------------------------------

    def _measured_elsewhere(self) -> bool:
        """Whether somebody's profiler runs; then a later step is measured."""
        return self._device == "cpu" and profiler_active()

    def _finish_measuring(self) -> None:
        gauge, self._gauge = self._gauge, None
        plan = self.plan
        assert gauge is not None
        assert plan is not None
        self._to_measure = False
        self.measured_above_bytes = gauge.above_bytes
        peak = plan.resident_bytes + gauge.above_bytes
        where = plan.schedule.actions[plan.timeline.peak_action]
        op = plan.program.ops[where.op] if isinstance(where, Compute) else "the boundary"
        if peak > plan.budget_bytes:
            raise BudgetExceeded(
                f"the step took {format_bytes(peak)}, its budget is {format_bytes(plan.budget_bytes)}, the plan "
                f"predicted {format_bytes(plan.predicted_peak_bytes)} at {op}; "
                "delete Ebbflow's cost cache and report the op if it happens again",
                budget_bytes=plan.budget_bytes,
                measured_peak_bytes=peak,
            )
        predicted = plan.timeline.above_bytes
        error = gauge.above_bytes / predicted - 1 if predicted else 0.0
        # What lies between the two windows of the measurement is not seen: tangents, a loss outside, and outputs
        # that user code lets go there.
        program = plan.program
        unseen = max(program.between_bytes, program.late_bytes)
        if unseen > _SCALARS_BYTES:
            unseen += sum(program.buffers[b].bytes for b in program.forward_outputs)
        if abs(gauge.above_bytes - predicted) > max(unseen, _TOLERANCE[self._device] * predicted):
            warnings.warn(
                f"the step took {format_bytes(gauge.above_bytes)} above its start, {format_percent(error)} off the "
                f"predicted {format_bytes(predicted)}; the budget holds",
                stacklevel=2,
            )


def _left_behind_bytes(plan: Plan) -> int:
    """Bytes of new values that go when they have been copied back: mutations, and those that no backward op reads."""
    program, actions = plan.program, plan.schedule.actions
    freed = {a.buffer for a in actions[: actions.index(Boundary())] if isinstance(a, Free)}
    return sum(program.buffers[b].bytes for b in program.copied_back.intersection(freed.union(program.mutations)))


def _own_node(outputs: object) -> Any:
    """The node of the step itself in the graph of what its forward returned: views of its results hang below it."""
    leaves = pytree.tree_leaves(outputs)
    nodes: list[Any] = [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    seen: set[Any] = set()
    for node in nodes:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return node
        if node not in seen:
            seen.add(node)
            nodes.extend(below for below, _ in node.next_functions if below is not None)
    return None


def _gauged(gauge: StepGauge, function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
    gauge.begin()
    try:
        return function(args)
    finally:
        gauge.end()


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """``function`` as AOTAutograd wants it: told by ``_boxed_call`` that it takes one list and empties it."""

    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _box(module: fx.GraphModule) -> None:
    """Generate code that takes its arguments as one list and empties it, so that no frame keeps saved tensors."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()


def _snapshot(module: torch.nn.Module, device: str) -> Callable[[], None]:
    """What puts buffers and random state back to where they are now."""
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if device == "cuda" else None

    def restore() -> None:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)

    return restore

"""A step of several graphs under one budget: what Dynamo's breaks leave of a call, in the order in which they ran.

1. A *piece* is a traced graph with its plans (``step``); an *occurrence* is one run of it in a step, a *gap* the code
   between two, which runs as in eager. What a piece reads of another's outputs is seen by storage.
2. A *sequence* is an order in which the pieces of a call's key have run; the last is expected, and where another piece
   comes, one that has begun in the same way. Where none is known, a piece runs under the plan that keeps least for its
   backward, and a line of the log says so.
3. The second step of a sequence keeps as little, and is recorded: what its gaps take is known then. From the third on
   its programs are *stitched* into one with its gaps (``step.pieces``), which is planned within the budget, and the
   schedule is cut back per occurrence. A graph that comes at other sizes runs the schedule of the same one.
4. Steps are recorded as those of one graph are (``judging``): the first ones, then ever fewer. One that goes over its
   budget is said at that step.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.capture.pieces import piece_of
from ebbtide.capture.refusals import ours_inside
from ebbtide.capture.symbolic.sizes import size_inputs
from ebbtide.capture.trace import compile_in_pieces, forget_step, settings_in_pieces
from ebbtide.cost.attach import with_measured_costs
from ebbtide.cost.profiling_budget import ProfilingBudget, profiling_within
from ebbtide.engine.call_context import CallContext
from ebbtide.engine.calls import Calls
from ebbtide.engine.compiled import Call
from ebbtide.engine.configuration import Configuration, Request
from ebbtide.engine.executable import Executable
from ebbtide.engine.executor import being_watched, choose_checks, run_forward, running_as
from ebbtide.engine.first_runs import Phase
from ebbtide.engine.optimizer_link import OptimizerLink
from ebbtide.engine.pending_steps import Holdings, Meets, Overlap, PendingStep, PendingSteps, returned_tensors
from ebbtide.engine.reserve import reserve_bytes
from ebbtide.engine.snapshot import snapshot
from ebbtide.engine.step import Step
from ebbtide.engine.traced_graph import TracedGraph
from ebbtide.engine.validity import LEAST_MEMORY, Validity
from ebbtide.errors import BudgetError, BudgetExceeded, CaptureError, VerificationError
from ebbtide.faults import users_level
from ebbtide.measurement.cpu_allocations import profiler_active
from ebbtide.measurement.garbage import collect_garbage
from ebbtide.measurement.leftovers import leave, watches_of
from ebbtide.measurement.step_record import MarkedRecord, Taken, ask_to_record
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planning.asked import Asked
from ebbtide.planning.pieces import schedule_at_home
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.planning.refusals import budget_error
from ebbtide.planning.step_end import SCALARS_BYTES
from ebbtide.ranks.member import ALONE
from ebbtide.report.plan import Plan
from ebbtide.step.legality import check
from ebbtide.step.pieces import Input, Occurrence, Output, Piece, Stitched, stitch
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_bytes, unplanned_schedule
from ebbtide.torch_seams.aot import boxed, mutated_inputs
from ebbtide.torch_seams.compile_mode import OwnCompileMode
from ebbtide.torch_seams.direct_calls import boxed_callable
from ebbtide.torch_seams.optimizers import gradient_of
from ebbtide.torch_seams.storages import StorageWatch, parameters_in
from ebbtide.units import Budget, format_allowed, format_bytes, format_count

if TYPE_CHECKING:
    from ebbtide.engine.compiled import Capture

__all__ = ["IN_PIECES", "StepInPieces", "may_run_in_pieces"]

_logger = logging.getLogger("ebbtide")
_UNBOUNDED = Budget(bytes=1 << 50)
_SLACK_BYTES = 2**10
_EVERY = 100
_MOST_SAID = 4
_MOST_WAYS = 16
"""Of one key, whose sequences are kept."""
_MOST_SIZES = 64
"""Of one graph, at which it is kept."""


class Model(Protocol):
    """What of a fitted model is needed (``model``)."""

    plain_class: type[torch.nn.Module]
    configuration: Configuration
    request: Request
    optimizers: OptimizerLink
    calls: Calls
    pending: PendingSteps


IN_PIECES = (
    'Or plan the parts of the step that are graphs: fit(..., options=ebbtide.Options(pieces="auto")); the code between '
    "them runs as in eager"
)
"""What a refusal of a call adds that is not one graph."""
GAP = "ebbtide.gap"
"""Target of what runs between two pieces."""


def may_run_in_pieces(model: Model, call: Call, now: CallContext) -> bool:
    """Whether a call that is not one graph is planned as several: not with what only whole steps have."""
    plain = model.request.given_plan is None and not now.updates and model.optimizers.offloaded is None
    return model.configuration.in_pieces and plain and not now.checkpointed and call.ranks is ALONE


class _Here(threading.local):
    run: _Run | None = None


_here = _Here()


class _Graph(TracedGraph):
    """A graph that Dynamo's breaks leave; runs are told of its forwards."""

    def __init__(self, *, device: str, name: str, verify: Any) -> None:
        super().__init__(device=device, name=name)
        self._verify = verify
        self.pieces: OrderedDict[tuple[int, ...], _Piece] = OrderedDict()

    def take_inputs(self, inputs: Sequence[object]) -> None:
        """Seen at its first run."""

    def take_results(self, results: Sequence[object], inputs: Sequence[object]) -> None:
        """The node of the forward that has just run is in the graph of what it gave, or has changed."""
        if _here.run is not None:
            _here.run.gave(results, inputs)

    def partition(self, joint: fx.GraphModule, forward_output_count: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Keep the joint graph, whose sizes may be symbols.

        Raises:
            CaptureError: if a fraction is one, with which tensors are computed.
        """
        if any(isinstance(each.meta.get("val"), torch.SymFloat) for each in joint.graph.nodes):
            raise CaptureError("a number that changes from step to step is computed with")
        self.symbolic = bool(size_inputs(joint.graph))
        return super().partition(joint, forward_output_count)

    def forward_callable(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Runs the next occurrence of the call that this thread is in."""

        def forward(args: list[Any]) -> Any:
            run = _here.run
            assert run is not None, "a piece of a step was called from elsewhere"
            return run.forward(self, args)

        return boxed(forward)

    def nothing_to_train(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Runs as it is."""
        return boxed(boxed_callable(graph))

    def piece(self, args: Sequence[Any], call: Call) -> _Piece:
        """At the sizes among ``args``."""
        sizes = tuple(each for each in args if isinstance(each, int)) if self.symbolic else ()
        if sizes not in self.pieces:
            step = Step(cast("Capture", self), verify=self._verify)
            step.piece.captured = self.at(args)
            step.piece.see_inputs(args, call, whole=False)
            self.pieces[sizes] = _Piece(self, step)
            if len(self.pieces) > _MOST_SIZES:
                self.pieces.popitem(last=False)
        self.pieces.move_to_end(sizes)
        return self.pieces[sizes]


class _Piece:
    """A graph at some sizes (definition 1).

    Args:
        graph: it.
        step: with its plans.
    """

    def __init__(self, graph: _Graph, step: Step) -> None:
        self.graph = graph
        self.step = step
        self.least_kept: Executable | None = None
        self._program: Program | None = None

    @property
    def captured(self) -> Captured:
        """The graph as a value."""
        found = self.step.piece.captured
        assert found is not None
        return found

    @property
    def may_be_timed(self) -> bool:
        """Whether its ops are, or can be: not while somebody's profiler runs."""
        return self._program is not None or not profiler_active()

    @property
    def program(self) -> Program:
        """Of the graph, with costs."""
        if self._program is None:
            self._program = with_measured_costs(self.captured.program, self.captured.calls, self.graph.device)
        return self._program


@dataclass(eq=False)
class _Occurrence:
    """One run of a piece (definition 1).

    Attributes:
        piece: that runs.
        pending: its forward and backward.
        sources: per primal the earlier occurrence and output that gave it; ``None`` for others.
        through: primals that take a gradient and come out of the gap before, with their bytes.
        shared: likewise, out of a gap before an earlier occurrence, which has read it: that one, and its primal.
        outputs: watches the outputs, without new values of inputs.
        used: of these, those that a later occurrence has read.
        died: outputs of earlier ones that nobody has any more, since the one before.
    """

    piece: _Piece
    pending: PendingStep
    sources: tuple[tuple[int, int] | None, ...]
    through: dict[int, int]
    shared: dict[int, tuple[int, int]]
    outputs: list[StorageWatch | None] = field(default_factory=list[StorageWatch | None])
    used: set[int] = field(default_factory=set[int])
    died: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


@dataclass(eq=False)
class _Sequence:
    """What is known of the calls of one key (definition 2).

    Attributes:
        occurrences: as they ran last.
        taken: what each part of a recorded step took; empty before there is one.
        plan: of the stitched program; ``None`` before it is planned.
        executables: of the plan, per occurrence.
        planned: whose they are.
        request: the number of what was asked for when it was planned.
        steps: how many there were.
        due: the next that is recorded.
        kept_bytes: by its occurrences for their backwards.
        aside_bytes: left free, since a step has taken more than its plan predicted.
        above_bytes: as measured last.
    """

    occurrences: list[_Occurrence] = field(default_factory=list[_Occurrence])
    taken: tuple[Taken, ...] = ()
    plan: Plan | None = None
    executables: list[Executable] = field(default_factory=list[Executable])
    planned: list[_Piece] = field(default_factory=list[_Piece])
    request: int = -1
    steps: int = 0
    due: int = 2
    kept_bytes: int = 0
    aside_bytes: int = 0
    above_bytes: int | None = None

    @property
    def graphs(self) -> list[_Graph]:
        """Of its occurrences."""
        return [each.piece.graph for each in self.occurrences]

    def forward_gap(self, index: int) -> Taken:
        """What the code before an occurrence took; the last is the window between the two graphs."""
        return self.taken[2 * index]

    def backward_gap(self, index: int) -> Taken:
        """What the code took that runs in the backward after that of an occurrence."""
        count = len(self.occurrences)
        return self.taken[2 * count + 2 * (count - 1 - index) + 2]


class _Run:
    """One call."""

    def __init__(
        self, host: StepInPieces, expected: _Sequence, ways: Sequence[_Sequence], call: Call, now: CallContext
    ) -> None:
        self.host, self.expected, self.sequence, self.now = host, expected, expected, now
        self._ways = ways
        self.call: Call | None = call
        """While its forward runs; it holds a batch."""
        self.occurrences: list[_Occurrence] = []
        self.record: MarkedRecord | None = None
        self.order: list[int] = []
        self.as_planned = self.same_sizes = self.same_way = True
        self._latest: _Occurrence | None = None
        self._given: dict[int, tuple[int, int]] = {}
        self._passed: dict[int, tuple[StorageWatch, tuple[int, int]]] = {}  # what has come out of gaps, by storage

    def forward(self, graph: _Graph, args: list[Any]) -> Any:
        """The next occurrence, of ``graph``."""
        index = len(self.occurrences)
        piece, executable = self._executable(index, graph, args)
        pending = PendingStep(
            executable,
            self.host.model.pending,
            Overlap(self.now.call_slot),
            Holdings(self.host),
            Meets(self.host.model.optimizers.in_backward),
            self.now.hooked,
        )
        choose_checks(pending, self.now.device)
        pending.measuring.gauge = None  # its window would span the others
        if pending.proves:
            pending.measuring.restore = self.host.restore
        sources, through, shared = self._sources(piece.captured, args)
        self._latest = occurrence = _Occurrence(piece, pending, sources, through, shared)
        occurrence.died = [*self._dead()]
        self.occurrences.append(occurrence)
        if self.record is not None:
            self.record.mark()
            pending.measuring.record = cast("Any", _Half(self, index))
        with running_as(pending):
            results = run_forward(args)
        if self.record is not None:
            self.record.mark()
        self._see_outputs(index, occurrence, results)
        piece.step.ran(executable)
        return results

    def _executable(self, index: int, graph: _Graph, args: list[Any]) -> tuple[_Piece, Executable]:
        sequence = self._way(index, graph)
        planned = self.as_planned and sequence.plan is not None
        if self.record is not None and not graph.pieces:
            self.record.end()  # ops that are new are timed, which no profiler may see
            self.record = None
        with self.host.aside(self.now.device):
            assert self.call is not None
            piece = graph.piece(args, self.call)
            if planned and sequence.planned[index] is piece:
                return piece, sequence.executables[index]
            if planned:
                self.same_sizes = False
                if (found := self.host.resized(piece, sequence.executables[index])) is not None:
                    return piece, found
            return piece, self.host.at_least_kept(piece)

    def _way(self, index: int, graph: _Graph) -> _Sequence:
        """What is known of steps that have come to ``graph`` as this one has, if anything is."""
        if self.as_planned and self.sequence.graphs[index : index + 1] != [graph]:
            so_far = [*(each.piece.graph for each in self.occurrences), graph]
            others = (each for each in reversed(self._ways) if each.graphs[: index + 1] == so_far)
            other = next(others, None)
            self.as_planned, self.same_way = other is not None, False
            self.sequence = self.sequence if other is None else other
        return self.sequence

    def _sources(
        self, captured: Captured, args: list[Any]
    ) -> tuple[tuple[tuple[int, int] | None, ...], dict[int, int], dict[int, tuple[int, int]]]:
        """Where primals are from, and those that take a gradient and come out of a gap."""
        sources: list[tuple[int, int] | None] = []
        through: dict[int, int] = {}
        shared: dict[int, tuple[int, int]] = {}
        gradients = captured.outputs[captured.forward_output_count :]
        for position, value in enumerate(args):
            if not isinstance(value, torch.Tensor):
                sources.append(None)
                continue
            watch = StorageWatch(value)
            found = self._given.get(watch.key)
            sources.append(found)
            own = bool(captured.parameters[position])
            if found is not None or own or not isinstance(gradients[position], fx.Node) or not self.occurrences:
                continue
            if watch.key in self._passed:
                shared[position] = self._passed[watch.key][1]
            else:
                through[position] = value.nbytes
                self._passed[watch.key] = watch, (len(self.occurrences), position)
        for each in sources:
            if each is not None:
                self.occurrences[each[0]].used.add(each[1])
        return tuple(sources), through, shared

    def _dead(self) -> Iterator[tuple[int, int]]:
        """Outputs that no later occurrence has read and that are gone, each once."""
        for giver, each in enumerate(self.occurrences):
            for output, watch in enumerate(each.outputs):
                if watch is not None and output not in each.used and not watch.alive:
                    each.outputs[output] = None
                    yield giver, output

    def _see_outputs(self, index: int, occurrence: _Occurrence, results: Sequence[Any]) -> None:
        captured = occurrence.piece.captured
        changed = mutated_inputs(captured.graph, captured.forward_output_count)
        inputs = {key for key, (giver, _) in self._given.items() if giver < index}
        for position, value in enumerate(results[: captured.forward_output_count]):
            if position in changed:
                continue
            watch = StorageWatch(value) if isinstance(value, torch.Tensor) else None
            if watch is not None and watch.key not in inputs:
                self._given[watch.key] = (index, len(occurrence.outputs))
            occurrence.outputs.append(watch)

    def gave(self, results: Sequence[object], inputs: Sequence[object]) -> None:
        """The forward that ran last has given ``results`` for ``inputs``."""
        latest, self._latest = self._latest, None
        if latest is not None:
            captured = latest.piece.captured
            changed = [value for node, value in zip(captured.primals, inputs, strict=False) if node in captured.mutated]
            latest.pending.register([results, changed])

    def abandon(self) -> None:
        """The call has raised."""
        for each in self.occurrences:
            each.pending.abandon()


class _Half:
    """Tells a step's record of one occurrence's backward; takes the place of a record of its own."""

    steady = False
    recorded = frozenset[int]()

    def __init__(self, run: _Run, index: int) -> None:
        self._run, self._index = run, index

    def begin(self) -> None:
        """The forward's mark is made by the run."""

    def forward_returned(self) -> None:
        """Likewise."""

    def backward_begins(self, *, retains: bool) -> None:
        """The backward of the occurrence starts."""
        self._run.order.append(self._index)
        if self._run.record is not None:
            self._run.record.backward_begins(retains=retains)

    def backward_returned(self) -> None:
        """It has returned."""
        if self._run.record is not None:
            self._run.record.backward_returned()

    def end(self) -> None:
        """It is given up."""

    def end_for(self, number: int) -> _Half:
        """Nothing is known of its blocks."""
        return self


class StepInPieces:
    """The steps of one model under the same modes, each in pieces.

    Args:
        model: what is known of it.
        call: the first.
        why: it is not one graph.
    """

    def __init__(self, model: Model, call: Call, why: CaptureError) -> None:
        self.model = model
        self._why = " ".join(str(why).rpartition("Why: ")[2].split()).rstrip(".")  # the error itself holds the call
        self.last: _Sequence | None = None
        self._device = call.device
        self._graphs: list[_Graph] = []
        self._sequences: dict[object, list[_Sequence]] = {}
        self._verdict: BudgetExceeded | str = ""
        self._ways = 0
        self._restore: Callable[[], None] | None = None
        self._stance = OwnCompileMode()
        held = weakref.ref(self)

        def piece() -> _Graph:
            host = held()
            assert host is not None
            made = _Graph(
                device=host._device,
                name=f"{model.plain_class.__name__}.{len(host._graphs)}",
                verify=model.configuration.verify,
            )
            host._graphs.append(made)
            return made

        self._compiled = compile_in_pieces(piece)
        self._forget = weakref.finalize(self, forget_step, self._compiled)
        self._forget.atexit = False

    # -- what users see -----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan of the step that ran last."""
        return None if self.last is None else self.last.plan

    @property
    def measured_above_bytes(self) -> int | None:
        """The measured peak above the step's start; ``None`` before it is measured."""
        return None if self.last is None else self.last.above_bytes

    @property
    def verified_buffers(self) -> int:
        """How many buffers came back with their bits in proven occurrences."""
        last = self.last
        return 0 if last is None else sum(each.first_runs.verified_buffers for each in last.executables)

    @property
    def phase(self) -> Phase:
        """Where it is on the way from captured to steady."""
        last = self.last
        if last is None or last.plan is None:
            return Phase.CAPTURED
        return min((each.first_runs.phase for each in last.executables), key=list(Phase).index)

    @property
    def pieces(self) -> int:
        """Of the step that ran last."""
        return 0 if self.last is None else len(self.last.occurrences)

    def __repr__(self) -> str:
        if (plan := self.plan) is None:
            return f"<Step in {format_count(self.pieces, 'piece')}, without a plan>"
        above = self.measured_above_bytes
        measured = "not measured" if above is None else f"measured {format_bytes(plan.resident_bytes + above)}"
        return (
            f"<Step of {plan.case} in {format_count(self.pieces, 'piece')}: planned "
            f"{format_bytes(plan.predicted_peak_bytes)} of {format_allowed(plan.budget_bytes)}, {measured}>"
        )

    # -- a call -------------------------------------------------------------------------------------------------

    def __call__(self, call: Call, now: CallContext) -> Any:
        """Run ``call``, within the budget where its pieces are known.

        Raises:
            BudgetError: if no schedule within the budget was found; nothing of the model has run.
            CaptureError: if no part of it that trains is a graph. It has run, and nothing of it is returned.
        """
        ways = self._sequences.setdefault(now.key, [])
        expected = ways[-1] if ways else _Sequence()
        expected.steps += 1
        resident = now.resident_bytes + self.model.optimizers.state_to_come_bytes()
        self._plan_if_needed(expected, call, now, resident)
        run = _Run(self, expected, ways, call, now)
        self._restore = self._snapshot(call, expected, now)
        outputs = self._run(run, call, now, resident)
        if not run.occurrences:
            raise CaptureError(
                f"{self._why}. No part of the step that trains is a graph either, so nothing of it can be planned"
            )
        self._learn(run, ways)
        self.model.calls.count_planned()
        return outputs

    def _learn(self, run: _Run, ways: list[_Sequence]) -> None:
        """What has run is a way that is known, at sizes that take no more than the planned ones, or a new one."""
        kept, graphs = sum(map(_leaves_bytes, run.occurrences)), [each.piece.graph for each in run.occurrences]
        sequence = next((each for each in (run.sequence, *ways) if each.graphs == graphs), None)
        if sequence is None:
            self._say_new(run, first=not ways)
            sequence = _Sequence()
        if sequence is not run.expected:
            sequence.steps += 1
        if sequence.plan is None or run.same_sizes or kept > sequence.kept_bytes:
            if sequence.plan is not None and not run.same_sizes:
                sequence.request = -1  # planned again, for these sizes
            sequence.occurrences, sequence.kept_bytes = run.occurrences, kept
        if sequence in ways:
            ways.remove(sequence)
        ways.append(sequence)
        del ways[:-_MOST_WAYS]
        run.sequence = self.last = sequence

    def _run(self, run: _Run, call: Call, now: CallContext, resident: int) -> Any:
        sequence = run.sequence
        if self._is_due(sequence, now):
            run.record = self._recorded(run, now, resident)
            run.record.begin()
        before, _here.run = _here.run, run
        try:
            outputs = self._stance.in_pieces(
                self._compiled,
                call.module,
                call.forward,
                call.args,
                call.kwargs,
                settings=settings_in_pieces,
                skips=lambda error: isinstance(ours_inside(error), CaptureError),
            )
        except BaseException as error:
            run.abandon()
            if run.record is not None:
                run.record.end()
            if isinstance(error, VerificationError) and self._restore is not None:
                self._restore()
            raise
        finally:
            _here.run, run.call = before, None
        if run.record is not None:
            run.record.forward_returned()
        leave(watches_of(returned_tensors(outputs)))
        return outputs

    def restore(self) -> None:
        """Put back what the step has changed before a proof failed."""
        if self._restore is not None:
            self._restore()

    def _snapshot(self, call: Call, sequence: _Sequence, now: CallContext) -> Callable[[], None] | None:
        """What puts back buffers, random state and gradients; ``None`` where nothing is proven."""
        proving = any(each.first_runs.phase in (Phase.PLANNED, Phase.PROVING) for each in sequence.executables)
        if sequence.plan is not None and not proving:
            return None
        put_back = snapshot(call.module.buffers(), now.device)
        without = [weakref.ref(each) for each in call.module.parameters() if each.grad is None]

        def restore() -> None:
            put_back()
            for each in without:
                if (parameter := each()) is not None:
                    parameter.grad = None

        return restore

    def _say_new(self, run: _Run, *, first: bool) -> None:
        self._ways += 1
        if self._ways > _MOST_SAID:
            return
        name, pieces = self.model.plain_class.__name__, format_count(len(run.occurrences), "piece")
        keeps = "This step and the next keep as little as they can for their backward; the third is planned"
        if first:
            _logger.warning("%s runs in %s, since %s. %s", name, pieces, self._why, keeps)
        else:
            more = "" if self._ways < _MOST_SAID else ". Of further ones nothing is said"
            _logger.warning("%s has gone another way, in %s. %s%s", name, pieces, keeps, more)

    # -- its plan -----------------------------------------------------------------------------------------------

    @contextmanager
    def aside(self, device: str) -> Iterator[None]:
        """Open around what is found out while a call runs: its random state is as before."""
        put_back = snapshot((), device)
        try:
            with torch.no_grad(), profiling_within(ProfilingBudget()):
                yield
        finally:
            put_back()

    def at_least_kept(self, piece: _Piece) -> Executable:
        """``piece`` under the plan that keeps least for its backward (definition 2)."""
        if piece.least_kept is None:
            others = (each.least_kept for each in piece.graph.pieces.values())
            known = next((each for each in others if each is not None), None)
            piece.least_kept = None if known is None else self.resized(piece, known)
        if piece.least_kept is None:
            program = piece.program if piece.may_be_timed else piece.captured.program
            kept = replace(program, between_bytes=unplanned_bytes(program))
            plan = make_plan(kept, _UNBOUNDED, resident_bytes=0, options=PlanningOptions(planner=LEAST_MEMORY))
            piece.least_kept = self._lowered(piece, replace(plan, program=program))
        return piece.least_kept

    def resized(self, piece: _Piece, executable: Executable) -> Executable | None:
        """The schedule of a plan for ``piece``, the same graph at other sizes; ``None`` if it does not do."""
        program, plan = piece.captured.program, executable.plan  # no op is timed for it
        if len(program.ops) != len(plan.program.ops) or check(program, plan.schedule):
            return None
        return self._lowered(piece, replace(plan, program=program))

    def _lowered(self, piece: _Piece, plan: Plan) -> Executable:
        validity = Validity(
            request=self.model.request.number,
            tentative=False,
            accumulates=False,
            updates=False,
            settings=(),
            moves=False,
            layouts=None,  # gradients that arrive otherwise are seen to as they come (``tangent_layouts``)
            cleared_bytes=0,
        )
        return piece.step.executable_for(piece.captured, plan, validity)

    def _plan_if_needed(self, sequence: _Sequence, call: Call, now: CallContext, resident: int) -> None:
        """Plan ``sequence``, if it is known and its plan does not hold."""
        if not sequence.taken:
            return
        plan, request = sequence.plan, self.model.request
        if plan is not None and sequence.request == request.number:
            if resident + plan.timeline.above_bytes <= plan.budget_bytes:
                return
        if not all(each.piece.may_be_timed for each in sequence.occurrences):
            return  # it runs as it did; a step that nobody watches is planned
        collect_garbage()
        stitched, numbers = self._stitched(sequence)
        verify = self.model.configuration.verify
        programs = {id(each.piece): each.piece.program for each in sequence.occurrences}
        reserve = sum(reserve_bytes(each, self._device, verify=verify) for each in programs.values())
        reserve += sequence.aside_bytes
        limit = request.budget.resolve(resident + unplanned_bytes(stitched.program))
        options = replace(
            self.model.configuration.planning, alternatives=None, made=None, quick=False, tiers=(), machine=None
        )
        asked = Asked(budget=Budget(bytes=limit), resident_bytes=resident, reserve_bytes=reserve, options=options)
        least = self._at_least_kept(stitched, sequence, numbers)
        plan = replace(_plan_at_home(stitched, asked, least), case=self.model.plain_class.__name__)
        home = plan.schedule
        cut = stitched.cut(home)
        sequence.planned = [each.piece for each in sequence.occurrences]
        sequence.executables = [
            self._lowered(piece, replace(plan, program=piece.program, schedule=cut[number]))
            for piece, number in zip(sequence.planned, numbers, strict=True)
        ]
        sequence.plan, sequence.request = plan, request.number
        sequence.due = min(sequence.due, sequence.steps)

    def _at_least_kept(self, stitched: Stitched, sequence: _Sequence, numbers: Sequence[int]) -> Schedule:
        """The schedules of the first steps, joined; a gap runs each op once."""
        schedules = [unplanned_schedule(each.piece.program) for each in stitched.occurrences]
        for each, number in zip(sequence.occurrences, numbers, strict=True):
            schedules[number] = self.at_least_kept(each.piece).plan.schedule
        return stitched.joined(schedules)

    def _stitched(self, sequence: _Sequence) -> tuple[Stitched, list[int]]:
        """The step as one program, and the numbers of its occurrences among those of gaps."""
        occurrences: list[Occurrence] = []
        numbers: list[int] = []
        pieces: dict[tuple[int, tuple[int, ...]], Piece] = {}
        gaps: dict[int, int] = {}
        for index, each in enumerate(sequence.occurrences):
            if (gap := _gap(sequence, index, numbers)) is not None:
                gaps[index] = len(occurrences)
                occurrences.append(gap)
            captured = replace(each.piece.captured, program=each.piece.program)
            through = sorted(each.through)
            direct = {position for position, source in enumerate(each.sources) if source is not None}
            positions = sorted(direct.union(through, each.shared))
            key = (id(each.piece), tuple(positions))
            piece = pieces.setdefault(key, piece_of(captured, positions))
            sources: list[tuple[int, int] | None] = []
            for position in positions:
                if position in each.through:
                    sources.append((gaps[index], through.index(position)))
                elif position in each.shared:
                    first, there = each.shared[position]
                    sources.append((gaps[first], sorted(sequence.occurrences[first].through).index(there)))
                elif (source := each.sources[position]) is not None:
                    sources.append((numbers[source[0]], source[1]))
            numbers.append(len(occurrences))
            occurrences.append(Occurrence(piece, tuple(sources), _weights(captured, piece, positions)))
        stitched = stitch(self.model.plain_class.__name__, occurrences)
        window, program = sequence.forward_gap(len(numbers)), stitched.program
        held = window.left_bytes - sum(each.bytes for each in program.buffers if each.producer is None)
        program = replace(program, between_bytes=max(window.own_peak_bytes, 0), held_bytes=held)
        return replace(stitched, program=program), numbers

    # -- its bytes ----------------------------------------------------------------------------------------------

    def _is_due(self, sequence: _Sequence, now: CallContext) -> bool:
        """Whether the step is recorded (definition 4); the first is not, whose ops are timed while it runs."""
        if not sequence.occurrences or now.checkpointed or sequence.steps < sequence.due:
            return False
        if now.device == "cpu":
            ask_to_record()
            return not being_watched(now.device)
        return True

    def _recorded(self, run: _Run, now: CallContext, resident: int) -> MarkedRecord:
        on_cpu = now.device == "cpu"
        leaves = (each for each in parameters_in(now.module) if on_cpu and each.is_leaf)

        def done(record: MarkedRecord) -> None:
            if record.is_whole:
                self._judge(run, record, resident)

        return MarkedRecord(
            now.device,
            start_bytes=resident,
            freed=watches_of(each for each in map(gradient_of, leaves) if each is not None),
            done=cast("Any", done),
            returned=self._say,
        )

    def _judge(self, run: _Run, record: MarkedRecord, resident: int) -> None:
        sequence, steps = run.sequence, run.sequence.steps
        count = len(sequence.occurrences)
        whole = len(record.taken) == 4 * count + 1 and run.order == [*reversed(range(count))]
        whole = whole and run.as_planned and run.same_sizes and run.same_way
        sequence.above_bytes = record.highest_bytes - resident
        if run.as_planned:  # else it is new, and the next is recorded
            sequence.due = 1 << steps.bit_length() if steps < _EVERY else steps + _EVERY
        if not sequence.taken and whole:
            sequence.taken = tuple(record.taken)
        plan = sequence.plan
        budget_bytes = self.model.request.budget.bytes if plan is None else plan.budget_bytes
        if budget_bytes is None or record.highest_bytes - budget_bytes <= _SLACK_BYTES:
            return
        if whole and plan is not None:
            sequence.taken, sequence.request = tuple(record.taken), -1
            sequence.aside_bytes += record.highest_bytes - budget_bytes
        predicted = "it kept as little as it can, before it is planned"
        if plan is not None:
            predicted = f"its plan predicted {format_bytes(plan.predicted_peak_bytes)}"
        what = (
            f"this step in {format_count(count, 'piece')} took {format_bytes(record.highest_bytes)}, over its budget "
            f"of {format_allowed(budget_bytes)}; {predicted}"
        )
        if self.model.configuration.on_violation == "raise":
            self._verdict = BudgetExceeded(what, budget_bytes=budget_bytes, measured_peak_bytes=record.highest_bytes)
        else:
            self._verdict = f"{what}. From the next step on there is room for what its code between the pieces takes"

    def _say(self) -> None:
        verdict, self._verdict = self._verdict, ""
        if isinstance(verdict, BudgetExceeded):
            raise verdict
        if verdict:
            warnings.warn(verdict, stacklevel=users_level())


def _plan_at_home(stitched: Stitched, asked: Asked, least: Schedule) -> Plan:
    """A plan whose reruns are at home; ``least`` is one that is, to be run where none of the planner's fits.

    Raises:
        BudgetError: if there is none within the budget, with the smallest that has one.
    """
    program, held = stitched.program, asked.held_bytes
    limit = asked.budget_bytes(program)
    made: list[Plan] = []

    def answer(above_bytes: int) -> Schedule | None:
        budget = Budget(bytes=max(above_bytes, 0) + held)
        try:
            plan = make_plan(
                program,
                budget,
                resident_bytes=asked.resident_bytes,
                reserve_bytes=asked.reserve_bytes,
                options=asked.options,
            )
        except BudgetError as error:
            smallest.append(error.smallest_bytes)
            return None
        made.append(plan)
        return plan.schedule

    def at_home(above_bytes: int) -> Schedule | None:
        found = schedule_at_home(stitched, above_bytes, answer)
        return least if found is None and needed <= above_bytes else found

    needed, smallest = simulate(program, least).above_bytes, list[int]()
    home = at_home(limit - held)
    if home is None:
        named = max(smallest[0] if smallest else 0, limit + 1)
        if at_home(named - held) is None:
            named = held + needed
        floor, op = floor_bytes(program)
        raise budget_error(
            asked,
            program,
            floor=(held + floor, op),
            smallest=named,
            unplanned=asked.resident_bytes + unplanned_bytes(program),
            interrupted=False,
        )
    if not made:
        answer(needed)
    return replace(made[-1], schedule=home, budget_bytes=limit)


def _gap(sequence: _Sequence, index: int, numbers: Sequence[int]) -> Occurrence | None:
    """The code before an occurrence as a piece of one op each way; ``None`` where it takes nothing."""
    through = sequence.occurrences[index].through
    before, back = sequence.forward_gap(index), sequence.backward_gap(index).own_peak_bytes
    peak = before.own_peak_bytes
    died = sequence.occurrences[index].died
    if not through and not died and max(peak, back) <= SCALARS_BYTES:
        return None
    given = [through[position] for position in sorted(through)]
    rest = max(before.own_left_bytes - sum(given), 0)
    taken: list[tuple[int, int, int]] = []
    for giver, each in enumerate(sequence.occurrences[:index]):
        for output, bytes_ in enumerate(_tangents_of(each)):
            reached = bytes_ and output not in each.used and _next_gap(sequence, giver) == index
            if reached or (giver, output) in died:
                taken.append((giver, output, bytes_))
    sizes = [bytes_ for _, _, bytes_ in taken if bytes_]
    buffers = [Buffer(f"gap{index}.given{i}", size, 0) for i, size in enumerate((*given, rest))]
    tangents = tuple(range(len(buffers), len(buffers) + len(given)))
    buffers += [Buffer(f"gap{index}.tangent{i}", size, None) for i, size in enumerate(given)]
    gradients = tuple(range(len(buffers), len(buffers) + len(sizes)))
    buffers += [Buffer(f"gap{index}.gradient{i}", size, 1) for i, size in enumerate((*sizes, 0))]
    kept = tuple(range(len(given) + 1))
    forward, backward = max(peak - sum(given) - rest, 0), max(back - sum(sizes), 0)
    ops = (
        Op(f"gap{index}", GAP, (), kept, workspace_bytes=forward, rerunnable=False),
        Op(
            f"gap{index}.backward",
            GAP,
            (len(given), *tangents),
            (*gradients, len(buffers) - 1),
            workspace_bytes=backward,
            rerunnable=False,
        ),
    )
    program = Program(f"gap{index}", ops, tuple(buffers), 1, forward_outputs=kept, gradients=gradients)
    given_back = iter(gradients)
    piece = Piece(
        program,
        tuple(Input((0,), next(given_back) if bytes_ else None) for _, _, bytes_ in taken),
        tuple(Output(given, tangent) for given, tangent in enumerate(tangents)),
    )
    return Occurrence(piece, tuple((numbers[giver], output) for giver, output, _ in taken))


def _leaves_bytes(occurrence: _Occurrence) -> int:
    executable = occurrence.pending.executable
    return 0 if executable is None else executable.leaves_bytes


def _weights(captured: Captured, piece: Piece, given: Sequence[int]) -> tuple[str, ...]:
    """Names of the parameters whose gradients a piece's ``weights`` are."""
    names: dict[int, str] = {}
    for position, node in enumerate(captured.outputs[captured.forward_output_count :]):
        buffer = captured.buffer_of.get(node) if isinstance(node, fx.Node) else None
        if buffer is not None and position not in given:
            names.setdefault(buffer, captured.parameters[position] or f"{id(captured)}.{position}")
    return tuple(names.get(each, "") for each in piece.weights)


def _tangents_of(occurrence: _Occurrence) -> list[int]:
    """Per output the bytes of its gradient; 0 for one that takes none."""
    piece = piece_of(occurrence.piece.captured, ())
    buffers = piece.program.buffers
    return [0 if each.tangent is None else buffers[each.tangent].bytes for each in piece.outputs]


def _next_gap(sequence: _Sequence, giver: int) -> int:
    """The occurrence before which the gap is that takes what ``giver`` gives to none; -1 if there is none."""
    after = range(giver + 1, len(sequence.occurrences))
    return next((index for index in after if sequence.occurrences[index].through), -1)

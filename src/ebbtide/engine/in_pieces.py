"""A step of several graphs under one budget: what Dynamo's breaks leave of a call, in the order in which they ran.

1. Pieces, occurrences, gaps and orders are ``traced_pieces``'s. What a piece reads of another's outputs is seen by
   storage (``running_call``).
2. The order that came last is expected; where another piece comes, one that has begun in the same way. Where none is
   known, a piece runs under the plan that keeps least for its backward, and a line of the log says so.
3. The second step of an order keeps as little, and is recorded: what its gaps take is known then. From the third on its
   programs are *stitched* into one with its gaps (``stitched_plan``), which is planned within the budget, and the
   schedule is cut back per occurrence. A graph that comes at other sizes runs the schedule of the same one.
4. Steps are recorded as those of one graph are (``judging``): the first ones, then ever fewer. One that goes over its
   budget is said at that step.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ebbtide.capture.trace import compile_in_pieces, forget_step, frames_in_pieces
from ebbtide.cost.profiling_budget import ProfilingBudget, profiling_within
from ebbtide.engine.call_context import CallContext
from ebbtide.engine.compiled import Call
from ebbtide.engine.executable import Executable
from ebbtide.engine.executor import being_watched
from ebbtide.engine.first_runs import Phase
from ebbtide.engine.pending_steps import returned_tensors
from ebbtide.engine.reserve import reserve_bytes
from ebbtide.engine.running_call import Model, RunInPieces
from ebbtide.engine.snapshot import snapshot
from ebbtide.engine.stitched_plan import plan_at_home, stitched_order
from ebbtide.engine.traced_pieces import Order, PieceGraph, SizedPiece, here, leaves_bytes
from ebbtide.engine.validity import LEAST_MEMORY, Validity
from ebbtide.errors import BudgetError, BudgetExceeded, CaptureError, VerificationError
from ebbtide.faults import users_level
from ebbtide.measurement.garbage import collect_garbage
from ebbtide.measurement.leftovers import leave, watches_of
from ebbtide.measurement.step_record import MarkedRecord, ask_to_record
from ebbtide.planning.asked import Asked
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.ranks.member import ALONE
from ebbtide.report.plan import Plan
from ebbtide.step.legality import check
from ebbtide.step.pieces import Stitched
from ebbtide.step.schedule import Schedule
from ebbtide.step.unplanned import unplanned_bytes, unplanned_schedule
from ebbtide.torch_seams.compile_mode import OwnCompileMode
from ebbtide.torch_seams.optimizers import gradient_of
from ebbtide.torch_seams.storages import parameters_in
from ebbtide.units import Budget, format_allowed, format_bytes, format_count

__all__ = ["IN_PIECES", "StepInPieces", "may_run_in_pieces"]

_logger = logging.getLogger("ebbtide")
_UNBOUNDED = Budget(bytes=1 << 50)
_SLACK_BYTES = 2**10
_EVERY = 100
_MOST_SAID = 4
_MOST_ORDERS = 16
"""Of one key, that are kept."""


IN_PIECES = (
    'Or plan the parts of the step that are graphs: fit(..., options=ebbtide.Options(pieces="auto")); the code between '
    "them runs as in eager"
)
"""What a refusal of a call adds that is not one graph."""


def may_run_in_pieces(model: Model, call: Call, now: CallContext) -> bool:
    """Whether a call that is not one graph is planned as several: not with what only whole steps have."""
    plain = model.request.given_plan is None and not now.updates and model.optimizers.offloaded is None
    return model.configuration.in_pieces and plain and not now.checkpointed and call.ranks is ALONE


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
        self.last: Order | None = None
        self._device = call.device
        self._graphs: list[PieceGraph] = []
        self._orders: dict[object, list[Order]] = {}
        self._verdict: BudgetExceeded | str = ""
        self._news = self._steps = 0
        self._restore: Callable[[], None] | None = None
        name = model.plain_class.__name__
        self._stance, self._frames = OwnCompileMode(), frames_in_pieces(_said_of(name))
        held, verify = weakref.ref(self), model.configuration.verify  # torch keeps what it compiles with

        def piece() -> PieceGraph:
            host = held()
            assert host is not None
            made = PieceGraph(device=host._device, name=f"{name}.{len(host._graphs)}", verify=verify)
            host._graphs.append(made)
            return made

        self._compiled = compile_in_pieces(piece)
        self._forget = weakref.finalize(self, forget_step, self._compiled, self._frames)
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
        return 0 if last is None else sum(each.first_runs.verified_buffers for each in last.proven)

    @property
    def phase(self) -> Phase:
        """Where it is on the way from captured to steady."""
        last = self.last
        if last is None or last.plan is None:
            return Phase.CAPTURED
        return min((each.first_runs.phase for each in last.proven), key=list(Phase).index)

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
            BudgetError: if no schedule within the budget was found. Nothing of the model has run; in first steps all
                before the piece that does not fit has, and buffers and random state are put back.
            CaptureError: if no part of it that trains is a graph. It has run; buffers and random state are put back.
        """
        orders = self._orders.setdefault(now.key, [])
        expected = orders[-1] if orders else Order()
        expected.steps += 1
        self._steps += 1
        resident = now.resident_bytes + self.model.optimizers.state_to_come_bytes()
        self._plan_if_needed(expected, resident)
        run = RunInPieces(self, expected, orders, call, now, resident)
        self._restore = self._snapshot(call, expected, now)
        outputs = self._run(run, call, now, resident)
        if not run.occurrences:
            self.restore()
            raise CaptureError(
                f"{self._why}. No part of the step that trains is a graph either, so nothing of it can be planned"
            )
        self._learn(run, orders)
        self.model.calls.count_planned()
        return outputs

    def _learn(self, run: RunInPieces, orders: list[Order]) -> None:
        """What has run is a way that is known, at sizes that take no more than the planned ones, or a new one."""
        kept, graphs = sum(map(leaves_bytes, run.occurrences)), [each.piece.graph for each in run.occurrences]
        order = next((each for each in (run.order, *orders) if each.graphs == graphs), None)
        if order is None:
            self._say_new(run, first=not orders)
            order = Order()
        if order is not run.expected:
            order.steps += 1
        if order.plan is None or run.same_sizes or kept > order.kept_bytes:
            if order.plan is not None and not run.same_sizes:
                order.request = -1  # planned again, for these sizes
            order.occurrences, order.kept_bytes = run.occurrences, kept
        if order in orders:
            orders.remove(order)
        orders.append(order)
        del orders[:-_MOST_ORDERS]
        run.order = self.last = order

    def _run(self, run: RunInPieces, call: Call, now: CallContext, resident: int) -> Any:
        order = run.order
        if self._is_due(order, now):
            run.record = self._recorded(run, now, resident)
            run.record.begin()
        before, here.run = here.run, run
        try:
            outputs = self._stance.in_pieces(
                self._compiled,
                call.module,
                call.forward,
                call.args,
                call.kwargs,
                frames=self._frames,
            )
        except BaseException as error:
            run.abandon()
            if run.record is not None:
                run.record.end()
            if isinstance(error, VerificationError | BudgetError):
                self.restore()
            raise
        finally:
            here.run, run.call = before, None
        if run.record is not None:
            run.record.forward_returned()
        leave(watches_of(returned_tensors(outputs)))
        return outputs

    def restore(self) -> None:
        """Put back what the step has changed before a proof failed."""
        if self._restore is not None:
            self._restore()

    def _snapshot(self, call: Call, order: Order, now: CallContext) -> Callable[[], None] | None:
        """What puts back buffers, random state and gradients; ``None`` where nothing is proven."""
        proving = any(each.first_runs.phase in (Phase.PLANNED, Phase.PROVING) for each in order.proven)
        if order.plan is not None and not proving:
            return None
        put_back = snapshot(call.module.buffers(), now.device)
        without = [weakref.ref(each) for each in call.module.parameters() if each.grad is None]

        def restore() -> None:
            put_back()
            for each in without:
                if (parameter := each()) is not None:
                    parameter.grad = None

        return restore

    def _say_new(self, run: RunInPieces, *, first: bool) -> None:
        self._news += 1
        if self._news > _MOST_SAID:
            return
        name, pieces = self.model.plain_class.__name__, format_count(len(run.occurrences), "piece")
        keeps = "This step and the next keep as little as they can for their backward; the third is planned"
        if first:
            _logger.warning("%s runs in %s, since %s. %s", name, pieces, self._why, keeps)
        else:
            more = "" if self._news < _MOST_SAID else ". Of further ones nothing is said"
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

    def at_least_kept(self, piece: SizedPiece) -> Executable:
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

    def within(self, piece: SizedPiece, executable: Executable, held: int) -> Executable:
        """``executable``, or one that takes less where it does not fit a budget in bytes beside ``held`` bytes.

        Raises:
            BudgetError: if nothing does.
        """
        limit = self.model.request.budget.bytes
        if limit is None or held + executable.plan.timeline.above_bytes <= limit:
            return executable
        options = PlanningOptions(planner=LEAST_MEMORY)
        program = executable.plan.program  # of a profiled step no op is timed
        return self._lowered(piece, make_plan(program, Budget(bytes=limit), resident_bytes=held, options=options))

    def resized(self, piece: SizedPiece, executable: Executable) -> Executable | None:
        """The schedule of a plan for ``piece``, the same graph at other sizes; ``None`` if it does not do."""
        program, plan = piece.captured.program, executable.plan  # no op is timed for it
        if len(program.ops) != len(plan.program.ops) or check(program, plan.schedule):
            return None
        return self._lowered(piece, replace(plan, program=program))

    def _lowered(self, piece: SizedPiece, plan: Plan) -> Executable:
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

    def _plan_if_needed(self, order: Order, resident: int) -> None:
        """Plan ``order``, if it is known and its plan does not hold."""
        if not order.taken:
            return
        plan, request = order.plan, self.model.request
        if plan is not None and order.request == request.number:
            if resident + plan.timeline.above_bytes <= plan.budget_bytes:
                return
        if not all(each.piece.may_be_timed for each in order.occurrences):
            return  # it runs as it did; a step that nobody watches is planned
        collect_garbage()
        stitched, numbers = stitched_order(self.model.plain_class.__name__, order)
        verify = self.model.configuration.verify
        programs = {id(each.piece): each.piece.program for each in order.occurrences}
        reserve = sum(reserve_bytes(each, self._device, verify=verify) for each in programs.values())
        reserve += order.aside_bytes
        limit = request.budget.resolve(resident + unplanned_bytes(stitched.program))
        options = replace(
            self.model.configuration.planning, alternatives=None, made=None, quick=False, tiers=(), machine=None
        )
        asked = Asked(budget=Budget(bytes=limit), resident_bytes=resident, reserve_bytes=reserve, options=options)
        least = self._at_least_kept(stitched, order, numbers)
        plan = replace(plan_at_home(stitched, asked, least), case=self.model.plain_class.__name__)
        home = plan.schedule
        cut = stitched.cut(home)
        order.planned = [each.piece for each in order.occurrences]
        order.executables = [
            self.at_least_kept(piece)
            if number < 0
            else self._lowered(piece, replace(plan, program=piece.program, schedule=cut[number]))
            for piece, number in zip(order.planned, numbers, strict=True)
        ]
        order.plan, order.request = plan, request.number
        order.due = min(order.due, order.steps)

    def _at_least_kept(self, stitched: Stitched, order: Order, numbers: Sequence[int]) -> Schedule:
        """The schedules of the first steps, joined; a gap runs each op once."""
        schedules = [unplanned_schedule(each.piece.program) for each in stitched.occurrences]
        for index in order.trains:
            schedules[numbers[index]] = self.at_least_kept(order.occurrences[index].piece).plan.schedule
        return stitched.joined(schedules)

    # -- its bytes ----------------------------------------------------------------------------------------------

    def _is_due(self, order: Order, now: CallContext) -> bool:
        """Whether the step is recorded (definition 4); the first is not, whose ops are timed while it runs.

        On CPU a record costs as much as a small step; a model that goes another way each time has some as well.
        """
        if not order.occurrences or now.checkpointed:
            return False
        if now.device != "cpu":
            return True
        if order.steps < order.due and self._steps & (self._steps - 1) and self._steps % _EVERY:
            return False
        ask_to_record()
        return not being_watched(now.device)

    def _recorded(self, run: RunInPieces, now: CallContext, resident: int) -> MarkedRecord:
        on_cpu = now.device == "cpu"
        leaves = (each for each in parameters_in(now.module) if on_cpu and each.is_leaf)

        def done(record: MarkedRecord) -> None:
            if record.is_whole:
                self._judge(run, record, resident)

        return MarkedRecord(
            now.device,
            start_bytes=resident,
            freed=watches_of(each for each in map(gradient_of, leaves) if each is not None),
            done=done,
            returned=self._say,
        )

    def _judge(self, run: RunInPieces, record: MarkedRecord, resident: int) -> None:
        order, steps = run.order, run.order.steps
        count = len(order.occurrences)
        came = sorted(set(run.backwards), reverse=True)
        whole = bool(came) and run.backwards == came and len(record.taken) == 2 * (count + len(came)) + 1
        whole = whole and run.as_planned and run.same_sizes and run.same_way
        order.above_bytes = record.highest_bytes - resident
        if run.as_planned:  # else it is new, and the next is recorded
            order.due = 1 << steps.bit_length() if steps < _EVERY else steps + _EVERY
        silent = frozenset(range(count)).difference(came)
        if not order.taken and whole:
            order.taken, order.silent = tuple(record.taken), silent
        plan = order.plan
        budget_bytes = self.model.request.budget.bytes if plan is None else plan.budget_bytes
        if budget_bytes is None or record.highest_bytes - budget_bytes <= _SLACK_BYTES:
            return
        if whole and plan is not None:
            order.taken, order.silent, order.request = tuple(record.taken), silent, -1
            order.aside_bytes += record.highest_bytes - budget_bytes
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


def _said_of(model: str) -> Callable[[str, str], None]:
    """Says once of a frame of the user's that it runs as in eager."""

    def left(place: str, why: str) -> None:
        _logger.warning("%s runs as in eager in the steps of %s: its compilation failed (%s)", place, model, why)

    return left

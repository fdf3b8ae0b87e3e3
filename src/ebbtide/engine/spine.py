"""The way of a training call, from top to bottom: capture, cost, plan, lower, prove, run.

1. A call is first tried on what is there: a captured step whose guards hold, under a plan that holds. That is all that
   happens in a steady step.
2. If no captured step's guards hold, the call is *captured*: one joint graph, read as a program.
3. If no plan holds, one is made, outside of the compiler and before anything of the model runs: the ops get their
   *costs*, a schedule within the budget is *planned*, *lowered* to two graphs, and these are *proven* to be the
   program.
4. Then the step *runs*: its forward now, its backward when autograd comes to it (``executor``).

A call of which nothing takes a gradient has no step: the capture says so, and it runs as it is.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ebbtide.capture.joint import Captured
from ebbtide.capture.loss import guarded
from ebbtide.cost.attach import with_measured_costs
from ebbtide.cost.cuda_workspace import has_product
from ebbtide.cost.room import Room, within
from ebbtide.engine.calls import NOTHING_TO_TRAIN
from ebbtide.engine.circumstances import Circumstances
from ebbtide.engine.compiled import Call, StaleCapture
from ebbtide.engine.derivatives import refuse_transforms
from ebbtide.engine.executable import Executable
from ebbtide.engine.executor import NothingToTrain, Unplanned, choose_checks
from ebbtide.engine.flights import Flight, returned_tensors
from ebbtide.engine.gradient_watcher import note_planned_again, own_backwards
from ebbtide.engine.model import FittedModel
from ebbtide.engine.plans import holding, plan_for, resident_bytes
from ebbtide.engine.reasons import reason_of
from ebbtide.engine.snapshot import snapshot
from ebbtide.engine.step import Step
from ebbtide.errors import BudgetError, CaptureError, EbbtideError, InternalError, VerificationError
from ebbtide.faults import forget_frames, own_faults
from ebbtide.measurement.leftovers import forget_dead, leave, watches_of
from ebbtide.measurement.libraries import take_workspaces
from ebbtide.measurement.resident import tensors_in
from ebbtide.optimizer.in_step.optimizer_in_backward import OptimizerInBackward
from ebbtide.planners import Progress
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.narration import narrated
from ebbtide.report.plan import Plan
from ebbtide.rewrites.choices import may_be_rewritten
from ebbtide.signals import signals_wait
from ebbtide.step.program import Program
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.torch_seams.autograd import release_failed_backward
from ebbtide.torch_seams.stance import NO_FRAMES
from ebbtide.torch_seams.trees import tree_leaves
from ebbtide.units import format_allowed, format_count

__all__ = ["train"]


_ROUNDS = 3
_MOST_TRIES = 3  # of a plan, while other threads ask for other budgets
"""In which a call is captured that something else changes meanwhile, such as another thread a flag of the model."""


def train(model: FittedModel, call: Call) -> Any:
    """One training call of a fitted model, planned; what its forward returns.

    Raises:
        CaptureError: if the call is not one graph.
        BudgetError: if no schedule within the budget was found; nothing of the model has run.
        PlanMismatch: if the plan that the user gave is not of this step.
        TierError: if a tier has no room or fails.
    """
    refuse_transforms()
    release_failed_backward()
    note_planned_again()
    if model.arrivals.watches:
        model.arrivals.call_begins(call.module.parameters(), first=not model.calls.planned)
    outside = sys.exception()
    try:
        if model.inside is None:
            return _trained(model, call)
        with model.inside.applied.aside():
            return _trained(model, call)
    except EbbtideError as error:
        forget_frames(error, outside)  # or a batch that was refused would have a place in no later step
        raise


class _Cramped(Exception):
    """A refused step whose capture had no room to ask kernels how they lay out results, which it rests on.

    Args:
        refused: with the budget in whose room it is to be captured again.
    """

    def __init__(self, refused: BudgetError) -> None:
        super().__init__()
        self.refused = refused


def _trained(model: FittedModel, call: Call) -> Any:
    """What :func:`train` gives."""
    outside = sys.exception()
    try:
        return _tried(model, call, None)
    except _Cramped as cramped:
        refused = cramped.refused
        forget_frames(refused, outside)
    return _tried(model, call, refused)


def _tried(model: FittedModel, call: Call, refused: BudgetError | None) -> Any:
    """The same; after it was ``refused`` for the last time, in the room that the named budget leaves."""
    if model.offloaded is not None:
        model.offloaded.leave()
    now = model.look_around(call)
    if model.inside is not None:
        model.inside.refuse_surroundings(call.module, checkpointed=now.checkpointed, hooked=bool(now.hooks))
    if now.key in model.not_captured:
        return _as_it_is(model, call)
    model.warn_of_flights(now)
    stale: StaleCapture | None = None
    for _ in range(_ROUNDS):
        for step in model.steps_for(call, now):
            try:
                return _planned(model, step, call, now, refused)
            except StaleCapture as found:
                stale = found
            except _Cramped:
                model.forget(step, now)
                raise
            except NothingToTrain:
                model.keep(step, now)
                return _as_it_is(model, call)
            except (CaptureError, InternalError) as error:
                if step.capture.symbolic and not step.forward_calls:
                    continue
                if _takes_gradients(call, now):
                    raise
                return _unless_trained(model, call, now, error)
    raise CaptureError(
        f"it was captured, and when it was to run it was another step: {stale}",
        remedy="let nothing change the model, or what its branches look at, while a training call runs",
    ) from stale


def _as_it_is(model: FittedModel, call: Call) -> Any:
    """``call`` as eager runs it: it has nothing to train, so that nothing is kept and nothing needs a plan."""
    model.calls.count_unplanned(NOTHING_TO_TRAIN)
    outputs = call.forward(call.module, *call.args, **call.kwargs)
    leave(watches_of(returned_tensors(outputs)))
    return outputs


def _takes_gradients(call: Call, now: Circumstances) -> bool:
    """Whether a parameter or an argument of ``call`` does, as far as can be seen."""
    arguments = tree_leaves((call.args, call.kwargs))
    return any(now.trained) or any(isinstance(each, torch.Tensor) and each.requires_grad for each in arguments)


def _unless_trained(model: FittedModel, call: Call, now: Circumstances, error: Exception) -> Any:
    """``call`` as it is, though it is no graph; what is hidden and takes gradients raises ``error``: it says why."""
    outputs = _as_it_is(model, call)
    if any(each.requires_grad for each in returned_tensors(outputs)):
        raise error
    model.not_captured.add(now.key)
    return outputs


def _planned(model: FittedModel, step: Step, call: Call, now: Circumstances, refused: BudgetError | None = None) -> Any:
    """``call`` under a plan of ``step`` that holds, or under a new one."""
    if (executable := holding(model, step, now)) is not None:
        return _run(model, step, executable, call, now)
    why = reason_of(model, step, call, now)
    if step.captured is not None:
        model.options.progress(Progress(f"the step of {model.plain_class.__name__} is {why}"))
    with own_backwards(), narrated(model.options.progress, why):
        for _ in range(_MOST_TRIES):
            asked, (now, executable) = model.asked, _made(model, step, call, now, refused)
            executable.asked = asked
            if model.asked == asked:
                break
            refused = None  # another thread has asked for another budget meanwhile
    return _run(model, step, executable, call, now)


def _made(
    model: FittedModel, step: Step, call: Call, now: Circumstances, refused: BudgetError | None
) -> tuple[Circumstances, Executable]:
    """What surrounds ``call`` once ``step`` is captured, and an executable for it."""
    room = _room(model, step, call, now, refused)
    with within(room):
        _capture(model, step, call, now)
    step.cramped = step.cramped or bool(room.untried)
    model.keep(step, now)
    step.capture.weigh_questions(call)
    with signals_wait():  # the callbacks of what dies would swallow what a handler raises
        gc.collect()  # what only garbage holds is not to be planned around
    forget_dead()
    if now.device == "cuda" and step.captured is not None and has_product(step.captured.program):
        take_workspaces()  # likewise: they would be taken in the step
    now = model.look_around(call)
    if (executable := holding(model, step, now)) is not None:
        return now, executable
    inside = model.inside if now.updates else None
    captured = step.captured_for(accumulating=now.accumulating and model.given_plan is None and inside is None)
    if inside is not None:
        inside.know(call.module)
        captured = inside.looked(captured)
    finished = captured if inside is None else inside.inside(captured)
    plan, provisional = _costed_and_planned(model, step, captured, finished, now, call, refused)
    model.options.progress(Progress("lowering the plan and proving its graphs"))
    executable = _lower_and_prove(step, captured, plan, inside)
    executable.provisional = provisional
    executable.serves.add(now.updates)
    executable.settings = () if inside is None else inside.settings
    return now, executable


def _costed_and_planned(
    model: FittedModel,
    step: Step,
    captured: Captured,
    finished: Captured,
    now: Circumstances,
    call: Call,
    refused: BudgetError | None,
) -> tuple[Plan, bool]:
    """Clause 3, up to the plan; ``finished`` is ``captured`` with the optimizer in it.

    A refused budget may have left no room to try some ops out, and what their kernels take besides their results is
    missing in the budget that the refusal names. They are tried out in what that one leaves then, as they would be if
    it were asked for, and the refusal is made anew.
    """
    while True:
        room = _room(model, step, call, now, refused)
        try:
            with within(room):
                planned = _plan(model, step, captured, _cost(model, finished, now), now, call)
            if refused is not None:  # its trials took more than the budget: no step may follow
                refused = _found_out(refused, planned[0])
                raise refused
            return planned
        except BudgetError as error:
            if error is not refused and step.cramped and room.trial_bytes == 0:
                raise _Cramped(error) from None
            named = _room(model, step, call, now, error)
            if error is refused or not any(map(named.holds, (*room.untried, *room.unknown))):
                for note in _rests_on(room, step):
                    error.add_note(note)
                raise
            refused = error


def _found_out(refused: BudgetError, plan: Plan) -> BudgetError:
    """The refusal of a budget for which there is ``plan``, which rests on what more than the budget found out."""
    smallest = min(plan.smallest_bytes, refused.budget_bytes)
    return BudgetError(
        f"whether a budget of {format_allowed(refused.budget_bytes)} is enough could not be found out within it. "
        "It is, as has been found out now with more memory than that: call the model again, and it trains within this "
        f"budget. The smallest for which a plan was found is {format_allowed(smallest)}",
        budget_bytes=refused.budget_bytes,
        floor_bytes=min(refused.floor_bytes, smallest),
        smallest_bytes=smallest,
        resident_bytes=refused.resident_bytes,
        pinned_by=refused.pinned_by,
        resident_parts=refused.resident_parts,
    )


def _rests_on(room: Room, step: Step) -> Iterator[str]:
    """What a refusal says of ops whose trial the budget had no room for."""
    if room.trial_bytes:
        yield "The smallest budget rests on what all ops took that were tried out in what that budget leaves"
    if room.untried or step.cramped:
        yield (
            "The smallest budget rests on estimates where ops had no room to be tried out: what their kernels take "
            "besides their results is not in it"
        )


def _room(model: FittedModel, step: Step, call: Call, now: Circumstances, refused: BudgetError | None) -> Room:
    """What of the budget is free for finding out about a step; nothing is known of a share before the capture.

    Where a budget was ``refused``, that is what the one leaves which the refusal names, or, if that is more, what no
    plan of the captured step stays below: what rewrites rest on is then found out whichever of them was planned so far.
    """
    resident = resident_bytes(step, now)
    above = 0 if step.captured is None else unplanned_bytes(step.captured.program)
    if model.budget.share is not None and step.captured is None:
        free = None
    else:
        free = max(0, model.budget.resolve(resident + above) - resident)
    lenders = list(tensors_in([call.module, call.args, call.kwargs, step.hidden_inputs]))
    if step.captured is None:  # an op that has no room may be one that is rewritten, and is in no plan otherwise
        strict = bool(model.rewrites) and model.budget.share is None
    else:
        strict = free is not None and above > free and may_be_rewritten(step.captured, model.rewrites)
    trial = 0
    if refused is not None:
        floor = 0 if step.captured is None else floor_bytes(step.captured.program)[0]
        trial = max((refused.smallest_bytes or 0) - resident, floor, 0)
    return Room(free, lenders, strict=strict, trial_bytes=trial)


def _capture(model: FittedModel, step: Step, call: Call, now: Circumstances) -> None:
    """Make the step a value, found by a call with nothing to run."""
    try:
        _run(model, step, None, call, now)
    except Unplanned as asked:
        if step.captured is None:
            step.captured = step.capture.at(asked.sizes)
            if not step.capture.symbolic:
                model.count_capture(now)
        step.look_at_inputs(asked.inputs, call)
        leave(watches_of(step.captured.constants))
        asked.inputs.clear()
    except (NothingToTrain, StaleCapture):
        raise
    except BaseException:
        if step.capture.made:  # it was captured when a signal came, which has waited; the next call needs no other
            model.keep(step, now)
        raise
    else:
        raise AssertionError("a step without a plan ran")


def _cost(model: FittedModel, captured: Captured, now: Circumstances) -> Program:
    """The program with seconds and workspaces; those of a plan that the user gave are the plan's own.

    ``captured`` has the optimizer in it, where it is.
    """
    if model.given_plan is not None:
        return captured.program
    model.options.progress(Progress(f"profiling its {format_count(len(captured.program.ops), 'op')}"))
    return with_measured_costs(captured.program, captured.calls, now.device)


def _plan(
    model: FittedModel, step: Step, captured: Captured, program: Program, now: Circumstances, call: Call
) -> tuple[Plan, bool]:
    """A schedule within the budget, with what is resident now; and whether it will do only until more is known."""
    with own_faults():
        return plan_for(model, step, captured, program, now, (call.args, call.kwargs))


def _lower_and_prove(step: Step, captured: Captured, plan: Plan, inside: OptimizerInBackward | None) -> Executable:
    """The plan's two graphs, each node of which is one of the captured step's, or an update by its optimizer."""
    with own_faults():
        return step.made_for(captured, plan, inside)


def _run(model: FittedModel, step: Step, executable: Executable | None, call: Call, now: Circumstances) -> Any:
    """The forward of ``call``; raises ``Unplanned`` where there is no executable and the capture's guards hold."""
    flight = Flight(
        executable, model.flights, now.slot, now.inputs, model.expected(now), hooked=now.hooked, capture=step.capture
    )
    flight.inside = model.inside
    if executable is not None:
        alone = not model.flights
        model.flights.disturb()
        choose_checks(flight, now.device)
        if executable.updates and model.inside is not None and not model.inside.has_updated:
            flight.gauge = None  # the optimizer makes its state in this step, which is counted as there already
        if flight.proves and alone:
            flight.restore = snapshot(step.changed_in(call.module), now.device)
    try:
        outputs, detached = step.capture(call, flight)
    except BaseException as error:
        flight.give_up()
        if isinstance(error, VerificationError) and flight.restore is not None:
            flight.restore()
        if isinstance(error, RuntimeError) and NO_FRAMES in str(error):
            raise CaptureError(
                "a torch dispatch mode (FlopCounterMode, allow_mutation_on_saved_tensors, ...) is active, under which "
                "torch compiles nothing, so this call cannot be planned",
                remedy="leave the mode around training calls; count or trace under torch.no_grad(), or on a copy of "
                "the model (copy.deepcopy), which is a plain one",
            ) from None
        raise
    assert executable is not None
    step.ran(executable)
    flight.take_off(outputs)
    model.ran(step, flight, now)
    model.calls.count_planned()
    return guarded(outputs, detached)

"""The way of a training call, from top to bottom: look, capture, plan, lower, prove, run.

1. A call is first tried on what is there: a captured step whose guards hold, under a plan that holds. That is all that
   happens in a steady step.
2. If no captured step's guards hold, the call is *captured*: one joint graph, read as a program.
3. If no plan holds, one is made, outside of the compiler and before anything of the model runs: the ops get their
   *costs*, a schedule within the budget is *planned*, *lowered* to two graphs, and these are *proven* to be the
   program.
4. Then the step *runs*: its forward now, its backward when autograd comes to it (``executor``).
5. What did not do is tried once more where something can be done about it (``attempts.Again``).

A call of which nothing takes a gradient has no step: the capture says so, and it runs as it is.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ebbtide.capture.joint import Captured
from ebbtide.capture.loss import guarded
from ebbtide.capture.refusals import frees_its_graph
from ebbtide.cost.attach import with_measured_costs
from ebbtide.cost.cuda_workspace import has_product
from ebbtide.cost.profiling_budget import ProfilingBudget, profiling_within
from ebbtide.engine.alike import alike_on_all_ranks
from ebbtide.engine.attempts import Again, Attempts
from ebbtide.engine.call_context import CallContext
from ebbtide.engine.calls import NOTHING_TO_TRAIN
from ebbtide.engine.clearing import clearing_of
from ebbtide.engine.compiled import Call
from ebbtide.engine.configuration import Configuration
from ebbtide.engine.demands import demand_of
from ebbtide.engine.derivatives import refuse_transforms
from ebbtide.engine.executable import Executable
from ebbtide.engine.executor import choose_checks
from ebbtide.engine.freed_graphs import GRAPH_FREED
from ebbtide.engine.frozen import watch_frozen
from ebbtide.engine.gradient_watcher import note_planned_again, own_backwards
from ebbtide.engine.in_pieces import IN_PIECES, StepInPieces, may_run_in_pieces
from ebbtide.engine.linked_outputs import watch_detached
from ebbtide.engine.model import FittedModel
from ebbtide.engine.offload_hooks import refuse_place
from ebbtide.engine.pending_steps import Holdings, Meets, Overlap, PendingStep, learn_overlap, returned_tensors
from ebbtide.engine.plans import PlanTask, plan_for, warn_of_forward
from ebbtide.engine.refinement import Wanted, contenders_of
from ebbtide.engine.sharded import refuse_newly_sharded
from ebbtide.engine.snapshot import snapshot
from ebbtide.engine.step import Step
from ebbtide.engine.traced_graph import StaleCapture
from ebbtide.engine.validity import Demand, Validity
from ebbtide.errors import BudgetError, CaptureError, EbbtideError, InternalError, VerificationError
from ebbtide.faults import forget_frames, own_faults, users_level
from ebbtide.measurement.device import on_device_of
from ebbtide.measurement.garbage import collect_after_failed_captures, collect_garbage, note_failed_capture
from ebbtide.measurement.leftovers import forget_dead, leave, watches_of
from ebbtide.measurement.libraries import take_workspaces
from ebbtide.measurement.resident import device_of, tensors_in
from ebbtide.measurement.step_record import give_way
from ebbtide.planners import Progress
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.narration import narrated
from ebbtide.planners.search.compile_beside import wait_for_compiled
from ebbtide.planning.asked import Made
from ebbtide.planning.step_end import most_of
from ebbtide.ranks.member import ALONE, member_of
from ebbtide.rewrites.choices import may_be_rewritten
from ebbtide.signals import raised_by_a_handler
from ebbtide.step.program import Program
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.torch_seams.autograd import release_failed_backward
from ebbtide.torch_seams.storages import parameters_in
from ebbtide.torch_seams.trees import tree_leaves
from ebbtide.units import format_allowed, format_count

__all__ = ["CHANGED", "FIRST", "IN_ROOM", "OTHER_WAY", "train"]

FIRST = "this takes a while, once for each shape of inputs and each setting of torch"
CHANGED = (
    "captured again, since something besides its inputs has changed that the step depends on (a mode, an attribute, "
    "a hook)"
)
OTHER_WAY = "captured for another way through the model, which asks for values of its inputs: {}, and is not here"
IN_ROOM = "captured again with more memory than its budget: what the refusal of this one rests on is found out so"
"""Why a call waits, where it is captured."""


def train(
    model: FittedModel,
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """One training call of a fitted model, planned; what its forward returns.

    Args:
        model: what is known of ``module``.
        module: the fitted model itself.
        forward: of its class, which takes the module first.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Raises:
        CaptureError: if the call is not one graph.
        BudgetError: if no schedule within the budget was found; nothing of the model has run.
        PlanMismatch: if the plan that the user gave is not of this step.
        TierError: if a tier has no room or fails.
        RankError: if another rank of a DistributedDataParallel fails, has ended or does not come; of Ebbtide's errors
            those that another rank raises.
    """
    every_output, ranks = model.configuration.every_output, member_of(module)
    call = Call(module, forward, args, kwargs, device_of([module]), every_output, ranks)
    attempts = Attempts()
    with _begun(model, call) as handled:
        while True:
            now = _look(model, call, attempts)
            if model.steps.is_no_graph(now):
                return _as_it_is(model, call)
            if (freed := model.steps.freed_graphs.refusal_of(call, now)) is not None:
                return _with_freed_graph(model, call, now, freed)
            in_pieces = model.in_pieces.get(now.modes)
            if in_pieces is not None and may_run_in_pieces(model, call, now):
                return _in_pieces(model, in_pieces, call, now)
            may_share = model.request.given_plan is None
            step = model.steps.candidate(call, now, attempts.rejected, may_share=may_share)
            fresh = not step.piece.capture.is_made
            try:
                executable = step.of_checkpoint(now) or _holding(model, step, now)
                if executable is None:
                    with call.ranks.planning():
                        now, executable = _make(model, step, call, now, attempts)
                    if executable is None:
                        return _as_it_is(model, call)
                    if executable.validity.request != model.request.number and attempts.may(Again.ASKED):
                        attempts.refused = None
                        continue
                call.ranks.planned()
                return _run(model, step, executable, call, now)
            except StaleCapture as error:
                attempts.reject(step, model.steps, now)
                attempts.count_stale(error, fresh=fresh)
            except BudgetError as error:
                if not _more_can_be_found_out(model, step, call, now, attempts, error):
                    raise
                forget_frames(error, handled)
                error.with_traceback(None)  # this frame is in it, and holds the attempts, which hold the error
            except (CaptureError, InternalError) as error:
                if step.piece.capture.symbolic and not step.forward_calls:
                    attempts.reject(step, model.steps, now)
                elif frees_its_graph(error) and not call.module.training:
                    return _with_freed_graph(model, call, now, error)
                elif _takes_gradients(call, now):
                    if not (isinstance(error, CaptureError) and may_run_in_pieces(model, call, now)):
                        if isinstance(error, CaptureError) and not model.configuration.in_pieces:
                            error.add_note(IN_PIECES)
                        raise
                    forget_frames(error, handled)
                    model.in_pieces[now.modes] = StepInPieces(model, call, error)
                else:
                    return _unless_trained(model, call, now, error)
            except Exception as error:  # of an op that torch cannot trace with sizes as symbols, or the user's own
                ours = isinstance(error, EbbtideError) or raised_by_a_handler(error)
                if ours or step.piece.capture.is_made or not step.piece.capture.symbolic:
                    raise
                attempts.reject(step, model.steps, now)


@contextmanager
def _begun(model: FittedModel, call: Call) -> Generator[BaseException | None]:
    """Open around a call, which it refuses where no step can be planned; gives the error that was handled before."""
    handled, ranks = sys.exception(), call.ranks
    model.judge.tell = ranks.tell
    try:
        ranks.enter(functools.partial(alike_on_all_ranks, call.module, model.request))
        _prepare(model, call)
        in_backward = model.optimizers.in_backward
        on_device = nullcontext() if call.device == "cpu" else on_device_of([call.module])  # may not be the current one
        aside = nullcontext() if in_backward is None else in_backward.gradient_guard.suspended()
        with on_device, aside:
            yield handled
        ranks.leave()
    except BaseException as error:
        if isinstance(error, EbbtideError):
            forget_frames(error, handled)  # or a batch that was refused would have a place in no later step
        ranks.failed(error)
        raise


def _prepare(model: FittedModel, call: Call) -> None:
    """Refuse what cannot be planned, and end what calls before have left open."""
    if call.device not in ("cpu", "cuda"):
        refuse_place(call.module, call.device)
    refuse_newly_sharded(call.module)
    refuse_transforms()
    release_failed_backward()
    note_planned_again()
    collect_after_failed_captures()
    model.judge.call_begins()
    model.refinements.look(model.request.number)
    if model.gradient_watcher.watches:
        model.gradient_watcher.call_begins(parameters_in(call.module), first=not model.calls.planned)


# -- look ---------------------------------------------------------------------------------------------------


def _look(model: FittedModel, call: Call, attempts: Attempts) -> CallContext:
    """What surrounds ``call``; what the optimizer keeps is away by then, if it is to be."""
    optimizers = model.optimizers
    if optimizers.offloaded is not None:
        optimizers.offloaded.send()
    now = model.observe(call)
    if optimizers.in_backward is not None:
        optimizers.in_backward.refuse_surroundings(call.module, checkpointed=now.checkpointed, hooked=bool(now.hooks))
    if now.pending and attempts.first and not now.checkpointed and not model.steps.is_no_graph(now):
        own = [each for each in now.pending if each.siblings is model.pending]
        if own and not any(model.learned.windows.expects_forwards(each.overlap.call_slot) for each in own):
            warn_of_forward("another forward of this model")
    attempts.first = False
    return now


def _holding(model: FittedModel, step: Step, now: CallContext) -> Executable | None:
    """A plan of ``step`` that holds."""
    return step.holding(_demand(model, step, now))


def _demand(model: FittedModel, step: Step, now: CallContext) -> Demand:
    return demand_of(step, now, request=model.request, learned=model.learned, optimizers=model.optimizers)


def _in_pieces(model: FittedModel, step: StepInPieces, call: Call, now: CallContext) -> Any:
    """``call`` in several graphs (``in_pieces``)."""
    call.ranks.planned()
    outputs = step(call, now)
    model.last = step
    return outputs


def _as_it_is(model: FittedModel, call: Call, reason: str = NOTHING_TO_TRAIN) -> Any:
    """``call`` as eager runs it: it has nothing to train, so that nothing is kept and nothing needs a plan."""
    call.ranks.planned()
    model.calls.count_unplanned(reason)
    outputs = call.forward(call.module, *call.args, **call.kwargs)
    returned = returned_tensors(outputs)
    if not any(each.requires_grad for each in returned):
        watch_frozen(model.plain_class.__name__)
    leave(watches_of(returned))
    return outputs


def _takes_gradients(call: Call, now: CallContext) -> bool:
    """Whether a parameter or an argument of ``call`` does, as far as can be seen."""
    arguments = tree_leaves((call.args, call.kwargs))
    return any(now.trained) or any(isinstance(each, torch.Tensor) and each.requires_grad for each in arguments)


def _unless_trained(model: FittedModel, call: Call, now: CallContext, error: Exception) -> Any:
    """``call`` as it is, though it is no graph; what is hidden and takes gradients raises ``error``: it says why."""
    outputs = _as_it_is(model, call)
    if any(each.requires_grad for each in returned_tensors(outputs)):
        raise error
    model.steps.note_no_graph(now)
    return outputs


def _with_freed_graph(model: FittedModel, call: Call, now: CallContext, error: CaptureError) -> Any:
    """``call`` as it is, which frees the graph of all that it returns; raises ``error`` if it does not."""
    outputs = _as_it_is(model, call, GRAPH_FREED)
    model.steps.freed_graphs.note(call, now, returned_tensors(outputs), error)
    return outputs


# -- capture, plan, lower, prove ------------------------------------------------------------------------------


def _make(
    model: FittedModel, step: Step, call: Call, now: CallContext, attempts: Attempts
) -> tuple[CallContext, Executable | None]:
    """What surrounds ``call`` once ``step`` is captured, and an executable for it; ``None`` if it trains nothing."""
    give_way()
    why = IN_ROOM if attempts.refused is not None else _why(model, step, call, now)
    progress = model.configuration.planning.progress
    if step.piece.captured is not None:
        progress(Progress(f"the step of {model.plain_class.__name__} is {why}"))
    with own_backwards(), narrated(progress, why):
        traced = not (step.piece.capture.symbolic and step.piece.capture.is_made)
        with profiling_within(_profiling_budget(model, step, call, now, attempts.refused)) as profiling:
            found = _capture(model, step, call, now)
        step.piece.profiled_without_memory = step.piece.profiled_without_memory or bool(profiling.untried)
        model.steps.keep(step, now)
        if not found:
            return now, None
        now = _settled(model, step, call, now, traced=traced)
        if (executable := _holding(model, step, now)) is not None:
            return now, executable
        request, in_backward = model.request, model.optimizers.in_backward if now.updates else None
        accumulating = now.accumulating and request.given_plan is None and in_backward is None
        captured = step.piece.captured_for(step.piece.layouts, accumulating=accumulating)
        if in_backward is not None:
            in_backward.bind(call.module)
            captured = in_backward.with_norms(captured)
        attempts.profiling = _profiling_budget(model, step, call, now, attempts.refused)
        wait_for_compiled()
        with profiling_within(attempts.profiling), own_faults():
            program = _cost(model, captured if in_backward is None else in_backward.with_updates(captured), now)
            demand, made = _demand(model, step, now), Made()
            plan, tentative, cleared_bytes = plan_for(
                PlanTask(
                    step=step,
                    captured=captured,
                    program=program,
                    now=now,
                    demand=demand,
                    arguments=(call.args, call.kwargs),
                    configuration=_configuration(model, call, made),
                    request=request,
                    windows=model.learned.windows,
                    optimizers=model.optimizers,
                    pending=model.pending,
                    other_plans=model.steps.plans(),
                ),
                attempts.profiling,
            )
        if attempts.refused is not None:
            _warn_of_trials(attempts.refused, attempts.profiling)
        progress(Progress("lowering the plan and proving its graphs"))
        validity = Validity(
            request=request.number,
            tentative=tentative,
            accumulates=step.piece.accumulates(captured),
            updates=now.updates,
            settings=demand.settings,
            moves=plan.schedule.moves,
            layouts=demand.layouts,
            cleared_bytes=cleared_bytes,
        )
        begin = time.perf_counter()
        lower = functools.partial(step.executable_for, captured, validity=validity, in_backward=in_backward)
        with own_faults():
            executable = lower(plan)
        if not tentative:
            model.refinements.want(
                Wanted(
                    step=step,
                    plan=plan,
                    others=contenders_of(plan, made.plans),
                    choose=made.choose,
                    end=most_of(demand.ends, plan.program),
                    options=model.configuration.planning,
                    lower=lower,
                    lower_seconds=time.perf_counter() - begin,
                    request=request.number,
                )
            )
        return now, executable


def _configuration(model: FittedModel, call: Call, made: Made) -> Configuration:
    """How ``call`` is planned: in full on several ranks, of which none is to change its plan while others wait."""
    planning = model.configuration.planning
    planning = replace(planning, quick=planning.quick and call.ranks is ALONE, made=made)
    return replace(model.configuration, planning=planning)


def _why(model: FittedModel, step: Step, call: Call, now: CallContext) -> str:
    """Why ``call``, of ``step``, has no plan that holds."""
    if step.piece.captured is not None:
        return f"planned again, since {step.why_none_holds(_demand(model, step, now))}"
    other = model.steps.answered_otherwise(call, now)
    if other is not None:
        return OTHER_WAY.format(other)
    return CHANGED if model.steps.knows(now) and not step.piece.capture.is_made else FIRST


def _capture(model: FittedModel, step: Step, call: Call, now: CallContext) -> bool:
    """Make the step a value, found by a call with nothing to run; whether it trains anything.

    Raises:
        StaleCapture: if the step does not serve the call.
        CaptureError: if the call is not one graph.
    """
    piece, pending = step.piece, _pending(model, step, None, now)
    try:
        inputs = piece.capture.inputs_of(call, pending)
    except StaleCapture:
        raise
    except BaseException:
        note_failed_capture()
        if piece.capture.is_made:  # it was captured when a signal came, which has waited; the next call needs no other
            model.steps.keep(step, now)
        raise
    finally:
        pending.abandon()
    if inputs is None:
        return False
    if piece.captured is None:
        piece.captured = piece.capture.at(inputs)
        if not piece.capture.symbolic:
            model.steps.count_capture(now)
    piece.see_inputs(inputs, call)
    leave(watches_of(piece.captured.constants))
    inputs.clear()  # frames of the compiler may live on
    return True


def _settled(model: FittedModel, step: Step, call: Call, now: CallContext, *, traced: bool) -> CallContext:
    """What surrounds ``call``, without what only its capture held, and with what libraries keep once they were used."""
    step.piece.capture.weigh_questions(call)
    if traced:
        collect_garbage()  # what only that holds is not to be planned around
    forget_dead()
    if now.device == "cpu" and traced:  # a card's allocator knows what they keep
        model.optimizers.look_for_others(call.module)
    captured = step.piece.captured
    if now.device == "cuda" and captured is not None and has_product(captured.program):
        take_workspaces()  # likewise: they would be taken in the step
    return model.observe(call)


def _cost(model: FittedModel, captured: Captured, now: CallContext) -> Program:
    """The program with seconds and workspaces; those of a plan that the user gave are the plan's own.

    ``captured`` has the optimizer in it, where it is.
    """
    if model.request.given_plan is not None:
        return captured.program
    count = format_count(len(captured.program.ops), "op")
    model.configuration.planning.progress(Progress(f"profiling its {count}"))
    return with_measured_costs(captured.program, captured.calls, now.device)


# -- a refused budget -----------------------------------------------------------------------------------------


def _more_can_be_found_out(
    model: FittedModel, step: Step, call: Call, now: CallContext, attempts: Attempts, error: BudgetError
) -> bool:
    """Whether ``error`` is made anew, with more known; what it rests on is added to one that stands.

    A refused budget may have left no room to try some ops out, and what their kernels take besides their results is
    missing in the budget that the refusal names. They are tried out in what that one leaves then, as they would be if
    it were asked for, and the refusal is made anew. So is the capture, if it had no room to ask kernels how they lay
    out results, on which the refusal rests.
    """
    profiling = attempts.profiling or ProfilingBudget()
    if step.piece.profiled_without_memory and not profiling.refused_bytes and attempts.may(Again.CAPTURED_IN_ROOM):
        model.steps.forget(step, now)
        attempts.refused = error
        return True
    named = _profiling_budget(model, step, call, now, error)
    found_out = any(map(named.holds, (*profiling.untried, *profiling.unknown_facts)))
    if found_out and attempts.may(Again.ROOM):
        attempts.refused = error
        return True
    for note in _rests_on(profiling, step):
        error.add_note(note)
    attempts.refused = None
    return False


def _warn_of_trials(refused: BudgetError, profiling: ProfilingBudget) -> None:
    """Say that there is a plan within a budget that was refused, and what it took to find that out."""
    if profiling.free_bytes is not None and profiling.refused_bytes > profiling.free_bytes:
        warnings.warn(
            f"whether a budget of {format_allowed(refused.budget_bytes)} is enough could not be found out within it: "
            "it is, and to try out kernels, once, this call may have exceeded it. What was found out is kept",
            stacklevel=users_level(),
        )


def _rests_on(profiling: ProfilingBudget, step: Step) -> Iterator[str]:
    """What a refusal says of ops whose trial the budget had no room for."""
    if profiling.refused_bytes:
        yield "The smallest budget rests on what all ops took that were tried out in what that budget leaves"
    if profiling.untried or step.piece.profiled_without_memory:
        yield (
            "The smallest budget rests on estimates where ops had no room to be tried out: what their kernels take "
            "besides their results is not in it"
        )


def _profiling_budget(
    model: FittedModel, step: Step, call: Call, now: CallContext, refused: BudgetError | None
) -> ProfilingBudget:
    """What of the budget is free for finding out about a step; nothing is known of a share before the capture.

    Where a budget was ``refused``, that is what the one leaves which the refusal names, or, if that is more, what no
    plan of the captured step stays below: what rewrites rest on is then found out whichever of them was planned so far.
    """
    captured, budget, rewrites = step.piece.captured, model.request.budget, model.configuration.rewrites
    resident = step.resident_bytes(now)
    above = 0 if captured is None else unplanned_bytes(captured.program)
    if budget.share is not None and captured is None:
        free = None
    else:
        free = max(0, budget.resolve(resident + above) - resident)
    lenders = list(tensors_in([call.module, call.args, call.kwargs, step.piece.hidden_inputs]))
    if captured is None:  # an op that has no room may be one that is rewritten, and is in no plan otherwise
        strict = bool(rewrites) and budget.share is None
    else:
        strict = free is not None and above > free and may_be_rewritten(captured, rewrites)
    trial = 0
    if refused is not None:
        floor = 0 if captured is None else floor_bytes(captured.program)[0]
        trial = max((refused.smallest_bytes or 0) - resident, floor, 0)
    return ProfilingBudget(free, lenders, strict=strict, refused_bytes=trial)


# -- run ------------------------------------------------------------------------------------------------------


def _pending(model: FittedModel, step: Step, executable: Executable | None, now: CallContext) -> PendingStep:
    return PendingStep(
        executable,
        model.pending,
        Overlap(now.call_slot, model.learned.windows.expected(now.call_slot)),
        Holdings(step.piece.capture, now.inputs),
        Meets(model.optimizers.in_backward),
        now.hooked,
    )


def _run(model: FittedModel, step: Step, executable: Executable, call: Call, now: CallContext) -> Any:
    """The forward of ``call`` under ``executable``."""
    pending = _pending(model, step, executable, now)
    pending.meets.exchange = call.ranks.exchange()
    pending.meets.clearing = clearing_of(now.module, now.cleared, now.gradient_bytes)
    alone = not model.pending
    before = model.pending.disturb(pending.number)
    choose_checks(pending, now.device)
    if executable.code.updates and pending.meets.optimizer is not None and not pending.meets.optimizer.has_updated:
        pending.measuring.gauge = None  # the optimizer makes its state in this step, which is counted as there already
    configuration = model.configuration
    model.judge.watch(
        pending,
        now,
        resident_bytes=step.resident_bytes(now),
        before=before,
        optimizers=model.optimizers,
        still_holds=lambda: executable.differs(_demand(model, step, now)) is None,
        on_violation=configuration.on_violation,
        given=model.request.given_plan is not None,
    )
    if pending.proves and alone:
        pending.measuring.restore = snapshot(step.piece.changed_in(call.module), now.device)
    try:
        outputs, detached = step.piece.capture(call, pending)
    except BaseException as error:
        pending.abandon()
        if isinstance(error, VerificationError) and pending.measuring.restore is not None:
            pending.measuring.restore()
        raise
    step.ran(executable)
    if executable.code.handed_out and now.device == "cpu":  # who asks for gradients of arguments keeps these
        leave(watches_of(each for each in tensors_in([call.args, call.kwargs]) if each.requires_grad))
    pending.register(outputs)
    if pending.node is None:  # nobody could say when its backward begins, or that none comes
        pending.measuring.end_record()
    _ran(model, step, pending, now)
    model.calls.count_planned()
    outputs, guards = guarded(outputs, detached)
    watch_detached(None if pending.node is None else pending.node(), guards)
    return outputs


def _ran(model: FittedModel, step: Step, pending: PendingStep, now: CallContext) -> None:
    """Note that the forward of ``step`` has returned."""
    optimizers = model.optimizers
    model.steps.keep(step, now)
    model.last = step
    if optimizers.offloaded is not None:
        step.optimizer_traffic = optimizers.offloaded.traffic
    if step.forward_calls > 1:
        model.steps.served_again(now)
    if pending.executable is not None:
        optimizers.forward_ran(now, pending.executable.plan)
    if pending.measuring.record is not None:
        pending.measuring.record.forward_returned()
    if now.flying_bytes and not now.checkpointed:
        learn_overlap(pending, [each for each in now.pending if each.number in each.siblings.by_number])

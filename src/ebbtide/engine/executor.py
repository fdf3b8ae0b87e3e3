"""What AOTAutograd calls: any captured step's forward and backward, run by the executable that is current.

1. A forward runs as the pending step that its thread has opened (:func:`running_as`). Without an executable it raises
   :class:`Unplanned`: the step's guards hold, nothing of the model has run, and somebody has to plan.
2. A backward runs the executable that its handle names, whatever is current by then.
3. One pending step of an executable at a time is *proven*: two would share the names of its buffers. A forward that a
   checkpoint repeats inside of a backward is followed by its own part of that backward, so it may be proven.
4. A step is *measured* if no other one of the model is pending and nobody's hooks or profiler look on.
5. A call *looks* at whether its capture holds before its forward begins (:func:`looking`), and signals wait for that.
6. What updates parameters in its backward (``inside``) cannot take that back. It is proven in a *rehearsal*, right
   before its first forward: the same two graphs with the same inputs, the loss' gradient taken for one, and no update.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ebbtide.engine.executable import Executable, executable_numbered
from ebbtide.engine.first_runs import Phase
from ebbtide.engine.gradient_watcher import note_planned
from ebbtide.engine.linked_outputs import watch_links
from ebbtide.engine.pending_steps import (
    PendingStep,
    learn_cleared,
    learn_retained,
    learn_together,
    pending_around,
    pending_step,
    pending_steps_of,
)
from ebbtide.engine.snapshot import snapshot
from ebbtide.engine.step_handles import ANY_STEP, read_step_handle, step_handle
from ebbtide.engine.tangent_layouts import Relaid
from ebbtide.errors import CaptureError, VerificationError
from ebbtide.measurement.cpu_allocations import profiler_active
from ebbtide.measurement.leftovers import hand_out, watches_of
from ebbtide.measurement.peak import StepGauge
from ebbtide.measurement.reserved import out_of_memory_explained
from ebbtide.measurement.step_record import note_backward
from ebbtide.optimizer.in_step.backward_updates import BackwardUpdates
from ebbtide.optimizer.in_step.updater import using_updater
from ebbtide.signals import signals_wait
from ebbtide.torch_seams.autograd import in_backward, keeps_graph, will_accumulate
from ebbtide.transfers.arena import arena_numbered, gone, travelling

__all__ = [
    "NothingToTrain",
    "Unplanned",
    "being_watched",
    "choose_checks",
    "looking",
    "note_results",
    "run_backward",
    "run_forward",
    "run_nothing",
    "running_as",
]


class Unplanned(Exception):
    """A forward has no executable (definition 1).

    Attributes:
        inputs: of the step, flat.
    """

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__("no plan is current")
        self.inputs = inputs


class NothingToTrain(CaptureError):
    """Nothing of this call takes a gradient: its step's guards hold, nothing has run, and nothing needs a plan."""

    def __init__(self) -> None:
        super().__init__("the step needs no gradient", remedy="unfreeze a parameter that takes part in it")


class _OfThread(threading.local):
    pending: PendingStep | None = None
    looking: _Looking | None = None


_thread = _OfThread()
_choosing = threading.RLock()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # that have run planned forwards; their numbers return


@contextmanager
def running_as(pending: PendingStep) -> Iterator[None]:
    """While open, a captured step that this thread calls runs as ``pending``."""
    before, _thread.pending = _thread.pending, pending
    try:
        yield
    finally:
        _thread.pending = before


class _Looking:
    """A block in which signals wait, which may end before it is left.

    An ``ExitStack`` that is closed early would keep what a handler raises in a cycle, and with it whatever its
    traceback holds: a batch, say, which no later step has room for.
    """

    def __init__(self) -> None:
        self._waiting: AbstractContextManager[None] | None = signals_wait("")
        self._waiting.__enter__()

    def end(self) -> None:
        """Run the handlers of what came, which may raise; a second time does nothing."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.__exit__(None, None, None)


@contextmanager
def looking() -> Iterator[None]:
    """Let signals wait (definition 5): open around a call of a captured step, over as soon as that runs."""
    before = _thread.looking
    _thread.looking = block = _Looking()
    try:
        yield
    finally:
        _thread.looking = before
        block.end()


def note_results(results: Sequence[object]) -> None:
    """The step that this thread runs has given ``results``, those that the model keeps for itself among them."""
    executable = None if _thread.pending is None else _thread.pending.executable
    if executable is not None and executable.code.links:
        watch_links(results, executable.code.links)


def choose_checks(pending: PendingStep, device: str) -> None:
    """Decide what is proven or measured in a step that is about to run (definitions 3 and 4)."""
    executable = pending.executable
    assert executable is not None
    repeated = in_backward()
    with _choosing:
        _threads.add(threading.current_thread())
        executable.start()
        first_runs = executable.first_runs
        if first_runs.phase is Phase.PROVING:
            if repeated or _may_be_proven(executable, pending):
                assert first_runs.fingerprints is not None
                first_runs.proving = pending.handle
                first_runs.fingerprints.restart()
                if first_runs.always and executable.measured.above_bytes is None:
                    pending.measuring.gauge = _gauge(pending, device, repeated=repeated)
            elif first_runs.proving == ANY_STEP:
                first_runs.proving = None  # its backward could not be told from this one's
        elif first_runs.phase is Phase.MEASURING:
            pending.measuring.gauge = _gauge(pending, device, repeated=repeated)


def _gauge(pending: PendingStep, device: str, *, repeated: bool) -> StepGauge | None:
    """What measures a step, or ``None`` (definition 4)."""
    disturbed = repeated or pending.hooked or bool(pending.siblings) or being_watched(device)
    return None if disturbed else StepGauge(device)


def _may_be_proven(executable: Executable, pending: PendingStep) -> bool:
    """Whether no other step is: neither a pending one, nor one on its way there in another thread.

    One whose node is not known may have come to nothing without a word; the next one takes its place.
    """
    unseen = any(each.number == executable.first_runs.proving for each in pending.siblings.without_node)
    return not pending_steps_of(executable) and (executable.first_runs.proving is None or unseen)


def run_forward(args: list[Any]) -> tuple[Any, ...]:
    """The outputs of the forward, the handle, and what is saved; empties ``args``."""
    pending = _thread.pending
    assert pending is not None, "a captured step was called from elsewhere"
    if _thread.looking is not None:
        _thread.looking.end()
    executable = pending.executable
    if executable is None:
        raise Unplanned(list(args))
    pending.ran = True
    if executable.code.updates:
        _prepare_updates(pending, executable, args)
    pending.holdings.arena = executable.code.arena(pending.number, pending.measuring.gauge is not None)
    checked = executable.first_runs.checked if pending.proves else None
    runs = executable.code.plain if checked is None else checked
    if pending.measuring.record is not None:
        pending.measuring.record.begin()
    with travelling(pending.holdings.arena), out_of_memory_explained(executable.plan.budget_bytes):
        if pending.measuring.gauge is not None:
            results = _gauged(pending.measuring.gauge, runs.forward, args)
            pending.measuring.gauge.forget(executable.left_behind_bytes)
        else:
            results = runs.forward(args)
    count = executable.code.output_count
    return (*results[:count], step_handle(executable.number, pending.handle), *results[count:])


def _prepare_updates(pending: PendingStep, executable: Executable, args: list[Any]) -> None:
    """Prepare updates in the backward (definition 6): this step will update, and is proven first."""
    assert pending.meets.optimizer is not None
    parameters = {position: (args[position], name) for position, name in executable.code.updates.items()}
    pending.meets.updates = BackwardUpdates(pending.meets.optimizer, parameters, executable.code.entries)
    if pending.proves and not executable.first_runs.rehearsed:
        _rehearse(pending, executable, list(args))
        executable.first_runs.rehearsed = True


class _Dropping:
    """Takes no update: its gradient is dropped, and nothing is found out."""

    def partial_norm(self, position: int, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.new_zeros(())

    def total_norm(self, norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return next(iter(norms.values())).new_zeros(())

    def update(self, position: int, gradient: torch.Tensor) -> None:
        pass


def _rehearse(pending: PendingStep, executable: Executable, args: list[Any]) -> None:
    """Run forward and backward with their checks and without their updates; random state is as before then.

    Nothing else is changed by the two: new values of buffers are copied back by who calls them.

    Raises:
        VerificationError: if a buffer came back with other bits.
    """
    first_runs, code = executable.first_runs, executable.code
    checked = first_runs.checked
    assert checked is not None
    put_back = snapshot((), code.device)
    arena = code.arena(pending.number)
    try:
        with travelling(arena), using_updater(_Dropping()):
            results = checked.forward(args)
            saved = list(results[code.output_count :])
            results = results[: code.output_count]
            saved += code.rehearsal_tangents()
            checked.backward(saved)  # which empties the list, so that each is freed after its last reader
            del results
    except BaseException:
        first_runs.proving = None
        raise
    finally:
        put_back()
        if arena is not None:
            arena.close()
    first_runs.proven()
    if first_runs.always:
        assert first_runs.fingerprints is not None
        first_runs.fingerprints.restart()
    else:
        first_runs.proving = None


def run_nothing(args: list[Any]) -> Any:
    """Raises :class:`NothingToTrain`."""
    args.clear()
    raise NothingToTrain


def run_backward(args: list[Any]) -> Any:
    """One gradient per primal, of what the forward saved and the tangents; empties ``args``."""
    note_planned()
    number, name = read_step_handle(args.pop(0))
    executable = executable_numbered(number)
    arena = arena_numbered(name)
    if arena is None and executable.code.moves:
        raise gone(executable.plan.tiers[0])
    pending = _pending_step(executable, name)
    if pending is not None:
        if pending.meets.exchange is not None:
            pending.meets.exchange.begins()
        pending.siblings.backwards += 1
        note_backward(pending.number)
        learn_cleared(pending)
        if pending.measuring.record is not None:
            pending.measuring.record.backward_begins(retains=keeps_graph())  # what follows is no code of the user's
    relaid = executable.layouts.relaid(args)
    taken = _begin_updates(executable, pending)
    explained = out_of_memory_explained(executable.plan.budget_bytes)
    with travelling(arena), _by_default(executable.code.default_dtype), explained:
        gradients = _gradients(executable, name, args, taken, relaid)
    if arena is not None:
        executable.measured.moved(arena.traffic)
        if not keeps_graph():
            arena.close()
    gradients = executable.code.unused.dropped(gradients)
    if executable.code.device == "cpu":
        _watch_handed_out(executable, pending, gradients)
    if pending is not None and pending.meets.sums is not None:
        pending.meets.sums.note(gradients)
    if pending is not None and pending.meets.exchange is not None:
        pending.meets.exchange.ends()
    return gradients


def _watch_handed_out(executable: Executable, pending: PendingStep | None, gradients: Sequence[Any]) -> None:
    """Watch the gradients that no walk over the model finds (``measurement.leftovers``).

    Those of arguments, and where ``torch.autograd.grad`` asks, all: nobody knows where their receiver puts them.
    """
    node = None if pending is None or pending.node is None else pending.node()
    if node is None or will_accumulate(node):
        found = [gradients[position] for position in executable.code.handed_out]
    else:
        found = list(gradients)
    if found:
        hand_out(watches_of(each for each in found if isinstance(each, torch.Tensor)))


def _begin_updates(executable: Executable, pending: PendingStep | None) -> BackwardUpdates | None:
    """What the backward of ``pending`` updates, once it is seen that nothing forbids that.

    Raises:
        CaptureError, UsageError: if something does. Nothing has been updated.
    """
    if pending is not None and pending.meets.optimizer is not None:
        pending.meets.optimizer.refuse_to_begin()
    if not executable.code.updates:
        return None
    if pending is None or pending.meets.updates is None or pending.node is None:
        raise CaptureError(
            "the backward cannot be told from another's: what the forward returned is in an object that Ebbtide does "
            'not look into, and step="inside" has to know whose parameters it updates',
            remedy="return tensors, or a tuple, list, dict or dataclass of them",
        )
    if pending.meets.optimizer is not None and pending.meets.optimizer.accumulates_in(pending.thread):
        raise CaptureError(
            "a backward begins in ebbtide.no_update(model), and its forward ran outside of it, so it would update the "
            "weights. Nothing has been updated",
            remedy="call the model in no_update too, as with DistributedDataParallel.no_sync",
        )
    if keeps_graph():
        raise CaptureError(
            'a backward with retain_graph=True (or create_graph=True) keeps what the next one needs, and step="inside" '
            "would have changed the weights by then. Nothing has been updated",
            remedy='add up losses and call backward() once, or leave step="inside" out',
        )
    if any(each.siblings is pending.siblings and each is not pending for each in pending_around(pending.siblings)):
        raise CaptureError(
            "another forward of this model is in flight, whose backward needs the weights as they are, and "
            'step="inside" would update them in this one. Nothing has been updated',
            remedy="call backward before the next forward; to accumulate, run all forwards and backwards but the last "
            "in ebbtide.no_update(model)",
        )
    pending.meets.updates.begin(pending.node(), executable.code.unused.left_out())
    return pending.meets.updates


def _updating(taken: BackwardUpdates, backward: Callable[..., Any], args: list[Any]) -> Any:
    """Run ``backward`` with the updates of ``taken``; what fails in it says what has been updated."""
    try:
        with using_updater(taken):
            return backward(args)
    except BaseException as error:
        instead = taken.failed(error)
        if instead is error:
            raise
        raise instead from error
    finally:
        taken.end()


@contextmanager
def _by_default(dtype: torch.dtype) -> Iterator[None]:
    """While open, the default type is ``dtype``: a forward may have run inside of a block that sets another."""
    outside = torch.get_default_dtype()
    if outside is dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(outside)


def _gradients(
    executable: Executable, name: int, args: list[Any], taken: BackwardUpdates | None, relaid: Relaid | None
) -> Any:
    pending = _pending_step(executable, name)
    gauge = None
    retained = keeps_graph()
    learn_together(pending)
    if pending is not None:
        again = not pending.is_pending
        pending.retire(retained=retained)
        if retained or again:
            learn_retained(pending, again=again)
        gauge, pending.measuring.gauge = pending.measuring.gauge, None
    first_runs = executable.first_runs
    checked = first_runs.checked if first_runs.proving == name else None
    backward = (checked or executable.code.plain).backward
    if relaid is not None:
        backward = relaid.backward(None if checked is None else first_runs.fingerprints) or backward
    elif retained and checked is None and not executable.code.moves:
        node = None if pending is None or pending.node is None else pending.node()
        backward = (None if node is None else executable.code.partial.of(node)) or backward
    if checked is not None:
        backward = functools.partial(_proven, executable, backward, pending)
    if taken is not None:
        backward = functools.partial(_updating, taken, backward)
    other = relaid is not None and not relaid.planned
    if gauge is None or being_watched(executable.code.device) or retained or other:  # what is in no plan
        gradients = backward(args)
    else:
        gauge.forget(executable.validity.cleared_bytes)
        gradients = _gauged(gauge, backward, args)
        gauge.close()
        if not gauge.disturbed:
            executable.hold_against(gauge)
    if pending is not None and pending.measuring.record is not None:
        pending.measuring.record.backward_returned()
    return gradients


def _pending_step(executable: Executable, name: int) -> PendingStep | None:
    """Whose backward this is. Under hooks it can be told only of a single one; the others end with their graphs."""
    if name != ANY_STEP:
        return pending_step(name)
    hooked = [each for each in pending_steps_of(executable) if each.hooked and each.executable is executable]
    return hooked[0] if len(hooked) == 1 else None


def _proven(executable: Executable, backward: Callable[..., Any], pending: PendingStep | None, args: list[Any]) -> Any:
    try:
        gradients = backward(args)
    except BaseException as error:
        executable.first_runs.proving = None
        if isinstance(error, VerificationError):
            if pending is not None and pending.measuring.restore is not None:
                pending.measuring.restore()
            if pending is not None and pending.hooked:
                raise VerificationError(
                    f"buffer {error.buffer} came back with other bits when {error.op} ran again, under saved-tensor "
                    "hooks (torch.autograd.graph.saved_tensors_hooks) that give back other values than they were given "
                    "(compression, quantization). No gradient of this step was handed out. Call the fitted model "
                    "outside of them: a budget takes their place",
                    buffer=error.buffer,
                    op=error.op,
                ) from error
        raise
    executable.first_runs.proven()
    return gradients


def being_watched(device: str) -> bool:
    """Whether nothing may be measured now: somebody's profiler runs, or other threads train as well.

    On CPU a measurement is a profiler's, of which a process has one: other threads must not be inside of a step.
    """
    if device != "cpu":
        return False
    if len(_threads) > 1:
        with _choosing:
            for each in [each for each in _threads if not each.is_alive()]:
                _threads.discard(each)
    return len(_threads) > 1 or profiler_active()


def _gauged(gauge: StepGauge, function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
    gauge.begin()
    try:
        return function(args)
    finally:
        gauge.end()

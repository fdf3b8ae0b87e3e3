"""What AOTAutograd calls: any captured step's forward and backward, run by the executable that is current.

1. A forward runs as the flight that its thread has opened (:func:`departing`). Without an executable it raises
   :class:`Unplanned`: the step's guards hold, nothing of the model has run, and somebody has to plan.
2. A backward runs the executable that its ticket names, whatever is current by then.
3. One flight of an executable at a time is *proven*: two would share the names of its buffers. A forward that a
   checkpoint repeats inside of a backward is followed by its own part of that backward, so it may be proven.
4. A flight is *measured* if no other one of the model is in the air and nobody's hooks or profiler look on.
5. A call *looks* at whether its capture holds before its forward begins (:func:`looking`), and signals wait for that.
6. What updates parameters in its backward (``inside``) cannot take that back. It is proven in a *rehearsal*, right
   before its first forward: the same two graphs with the same inputs, the loss' gradient taken for one, and no update.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ebbtide.engine.executable import Executable, executable_numbered
from ebbtide.engine.first_runs import Phase
from ebbtide.engine.flights import Flight, aloft, flight_numbered, flights_of, learn_together
from ebbtide.engine.gradient_watcher import note_planned
from ebbtide.engine.known_windows import learn_retained
from ebbtide.engine.snapshot import snapshot
from ebbtide.engine.tickets import ANY_FLIGHT, read_ticket, ticket
from ebbtide.errors import CaptureError, VerificationError
from ebbtide.measurement.cpu_allocations import profiler_active
from ebbtide.measurement.peak import StepGauge
from ebbtide.optimizer.in_step.backward_updates import BackwardUpdates
from ebbtide.optimizer.in_step.updater import using_updater
from ebbtide.signals import signals_wait
from ebbtide.torch_seams.autograd import in_backward, keeps_graph
from ebbtide.transfers.arena import arena_numbered, gone, travelling

__all__ = [
    "NothingToTrain",
    "Unplanned",
    "being_watched",
    "choose_checks",
    "departing",
    "looking",
    "run_backward",
    "run_forward",
    "run_nothing",
]


class Unplanned(Exception):
    """Definition 1.

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


class _Departing(threading.local):
    flight: Flight | None = None
    looking: _Looking | None = None


_departing = _Departing()
_choosing = threading.RLock()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # that have run planned forwards; their numbers return


@contextmanager
def departing(flight: Flight) -> Iterator[None]:
    """While open, a captured step that this thread calls runs as ``flight``."""
    before, _departing.flight = _departing.flight, flight
    try:
        yield
    finally:
        _departing.flight = before


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
    """Definition 5: open around a call of a captured step, over as soon as that runs."""
    before = _departing.looking
    _departing.looking = block = _Looking()
    try:
        yield
    finally:
        _departing.looking = before
        block.end()


def choose_checks(flight: Flight, device: str) -> None:
    """Decide what is proven or measured in a step that is about to run (definitions 3 and 4)."""
    executable = flight.executable
    assert executable is not None
    repeated = in_backward()
    with _choosing:
        _threads.add(threading.current_thread())
        executable.start()
        first_runs = executable.first_runs
        if first_runs.phase is Phase.PROVING:
            if repeated or _may_be_proven(executable, flight):
                assert first_runs.fingerprints is not None
                first_runs.proving = flight.name
                first_runs.fingerprints.restart()
                if first_runs.always and executable.measured.above_bytes is None:
                    flight.gauge = _gauge(flight, device, repeated=repeated)
            elif first_runs.proving == ANY_FLIGHT:
                first_runs.proving = None  # its backward could not be told from this one's
        elif first_runs.phase is Phase.MEASURING:
            flight.gauge = _gauge(flight, device, repeated=repeated)


def _gauge(flight: Flight, device: str, *, repeated: bool) -> StepGauge | None:
    """Definition 4."""
    disturbed = repeated or flight.hooked or bool(flight.home) or being_watched(device)
    return None if disturbed else StepGauge(device)


def _may_be_proven(executable: Executable, flight: Flight) -> bool:
    """Whether no other flight is: neither in the air, nor on its way there in another thread.

    One whose node is not known may have come to nothing without a word; the next one takes its place.
    """
    unseen = any(each.number == executable.first_runs.proving for each in flight.home.unseen)
    return not flights_of(executable) and (executable.first_runs.proving is None or unseen)


def run_forward(args: list[Any]) -> tuple[Any, ...]:
    """The outputs of the forward, the ticket, and what is saved; empties ``args``."""
    flight = _departing.flight
    assert flight is not None, "a captured step was called from elsewhere"
    if _departing.looking is not None:
        _departing.looking.end()
    executable = flight.executable
    if executable is None:
        raise Unplanned(list(args))
    flight.ran = True
    if executable.code.updates:
        _prepare_updates(flight, executable, args)
    flight.arena = executable.code.arena(flight.number, flight.gauge is not None)
    checked = executable.first_runs.checked if flight.proves else None
    runs = executable.code.plain if checked is None else checked
    with travelling(flight.arena):
        if flight.gauge is not None:
            results = _gauged(flight.gauge, runs.forward, args)
            flight.gauge.forget(executable.left_behind_bytes)
        else:
            results = runs.forward(args)
    count = executable.code.output_count
    return (*results[:count], ticket(executable.number, flight.name), *results[count:])


def _prepare_updates(flight: Flight, executable: Executable, args: list[Any]) -> None:
    """Definition 6: the step of this flight will update, and is proven first."""
    assert flight.inside is not None
    parameters = {position: (args[position], name) for position, name in executable.code.updates.items()}
    flight.updating = BackwardUpdates(flight.inside, parameters, executable.code.entries)
    if flight.proves and not executable.first_runs.rehearsed:
        _rehearse(flight, executable, list(args))
        executable.first_runs.rehearsed = True


class _Dropping:
    """Takes no update: its gradient is dropped, and nothing is found out."""

    def partial_norm(self, position: int, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.new_zeros(())

    def total_norm(self, norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return next(iter(norms.values())).new_zeros(())

    def update(self, position: int, gradient: torch.Tensor) -> None:
        pass


def _rehearse(flight: Flight, executable: Executable, args: list[Any]) -> None:
    """Run forward and backward with their checks and without their updates; random state is as before then.

    Nothing else is changed by the two: new values of buffers are copied back by who calls them.

    Raises:
        VerificationError: if a buffer came back with other bits.
    """
    first_runs, code = executable.first_runs, executable.code
    checked = first_runs.checked
    assert checked is not None
    put_back = snapshot((), code.device)
    arena = code.arena(flight.number)
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
    number, name = read_ticket(args.pop(0))
    executable = executable_numbered(number)
    arena = arena_numbered(name)
    if arena is None and executable.code.moves:
        raise gone(executable.plan.tiers[0])
    flight = _flight(executable, name)
    if flight is not None:
        flight.home.backwards += 1
    taken = _begin_updates(executable, flight)
    with travelling(arena), _by_default(executable.code.default_dtype):
        gradients = _gradients(executable, name, args, taken)
    if arena is not None:
        executable.measured.moved(arena.traffic)
        if not keeps_graph():
            arena.close()
    return executable.code.unused.dropped(gradients)


def _begin_updates(executable: Executable, flight: Flight | None) -> BackwardUpdates | None:
    """What the backward of ``flight`` updates, once it is seen that nothing forbids that.

    Raises:
        CaptureError, UsageError: if something does. Nothing has been updated.
    """
    if flight is not None and flight.inside is not None:
        flight.inside.refuse_to_begin()
    if not executable.code.updates:
        return None
    if flight is None or flight.updating is None or flight.node is None:
        raise CaptureError(
            "the backward cannot be told from another's: what the forward returned is in an object that Ebbtide does "
            'not look into, and step="inside" has to know whose parameters it updates',
            remedy="return tensors, or a tuple, list, dict or dataclass of them",
        )
    if flight.inside is not None and flight.inside.accumulates_in(flight.thread):
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
    if any(each.home is flight.home and each is not flight for each in aloft(flight.home)):
        raise CaptureError(
            "another forward of this model is in flight, whose backward needs the weights as they are, and "
            'step="inside" would update them in this one. Nothing has been updated',
            remedy="call backward before the next forward; to accumulate, run all forwards and backwards but the last "
            "in ebbtide.no_update(model)",
        )
    flight.updating.begin(flight.node(), executable.code.unused.left_out())
    return flight.updating


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


def _gradients(executable: Executable, name: int, args: list[Any], taken: BackwardUpdates | None) -> Any:
    flight = _flight(executable, name)
    gauge = None
    retained = keeps_graph()
    learn_together(flight)
    if flight is not None:
        again = flight.number not in flight.home.in_the_air
        flight.land(retained=retained)
        if retained or again:
            learn_retained(flight, again=again)
        gauge, flight.gauge = flight.gauge, None
        if flight.between is not None:
            flight.between.mark()
    backward = executable.code.plain.backward
    if executable.first_runs.proving == name and executable.first_runs.checked is not None:
        backward = functools.partial(_proven, executable, executable.first_runs.checked.backward, flight)
    if taken is not None:
        backward = functools.partial(_updating, taken, backward)
    if gauge is None or being_watched(executable.code.device) or retained:  # what is retained is in no plan
        gradients = backward(args)
    else:
        gradients = _gauged(gauge, backward, args)
        gauge.close()
        if not gauge.disturbed:
            executable.hold_against(gauge)
    if flight is not None and flight.between is not None:
        flight.between.returned()
    return gradients


def _flight(executable: Executable, name: int) -> Flight | None:
    """Whose backward this is. Under hooks it can be told only of a single one; the others end with their graphs."""
    if name != ANY_FLIGHT:
        return flight_numbered(name)
    hooked = [each for each in flights_of(executable) if each.hooked and each.executable is executable]
    return hooked[0] if len(hooked) == 1 else None


def _proven(executable: Executable, backward: Callable[..., Any], flight: Flight | None, args: list[Any]) -> Any:
    try:
        gradients = backward(args)
    except BaseException as error:
        executable.first_runs.proving = None
        if isinstance(error, VerificationError):
            if flight is not None and flight.restore is not None:
                flight.restore()
            if flight is not None and flight.hooked:
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

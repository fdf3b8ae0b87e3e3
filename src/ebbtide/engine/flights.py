"""Forwards whose backward has not come.

1. A *flight* begins with a forward. It is *in the air* until its backward begins or its autograd node is gone; the
   node is what knows, since user code may drop the outputs or keep them. A backward that retains its graph leaves it
   *retained*, until another does not or the node is gone.
2. What a flight in the air or retained keeps (``Executable.leaves_bytes``) is resident for whatever starts meanwhile.
   Ctrl-C may come in the finalizer that says that the node is gone; whoever looks for flights sees to those.
3. A flight that another forward of its model joins is *disturbed*: nothing is measured in it any more, and a failed
   proof puts nothing back.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ebbtide.cost.cache import product_precisions
from ebbtide.engine.derivatives import refuse_second_derivative
from ebbtide.engine.executable import Executable
from ebbtide.engine.hook_order import keep_order
from ebbtide.engine.key import Slot
from ebbtide.engine.tickets import ANY_FLIGHT
from ebbtide.engine.unused import note_arrived
from ebbtide.errors import CaptureError
from ebbtide.measurement.between import BetweenGauge
from ebbtide.measurement.leftovers import leave, watches_of
from ebbtide.measurement.peak import StepGauge
from ebbtide.optimizer.in_step.backward_updates import BackwardUpdates
from ebbtide.optimizer.in_step.optimizer_in_backward import OptimizerInBackward
from ebbtide.torch_seams.autograd import is_function_node, saved_by
from ebbtide.torch_seams.storages import StorageWatch
from ebbtide.torch_seams.trees import tree_leaves
from ebbtide.transfers.arena import Arena

__all__ = [
    "Flight",
    "Flights",
    "aloft",
    "flight_numbered",
    "flights_of",
    "kept_bytes",
    "kept_inputs",
    "returned_tensors",
]

_MOST_UNSEEN = 64
_CHANGED = re.compile(r"modified by an inplace operation: \[([^\]]*\])")
NO_SLOT = Slot(None, 0)
_numbers = itertools.count(1)  # 0 is tickets.ANY_FLIGHT
# Of all models, by number: those whose autograd node is alive, and of these the ones that keep what they saved. Who
# collects losses keeps thousands of nodes alive: only the second is ever walked.
_with_node: dict[int, Flight] = {}
_keeping: dict[int, Flight] = {}


@dataclass(eq=False)
class Flight:
    """One forward and its backward.

    Attributes:
        executable: what runs; ``None`` while a compiled step is asked whether its guards hold.
        home: the flights of its model.
        slot: key of its call, and how many flights of its model were in the air when it started.
        expects: slots of the calls that it was planned with room for.
        meanwhile: slots of those that started while it was in the air.
        inputs: watches the arguments of its call, which are saved for the backward whoever else drops them.
        hooked: whether saved-tensor hooks were active, so that its ticket does not name it.
        ran: whether the forward ran.
        gauge: records the peak of this step, if it is to be measured.
        between: measures user code between forward and backward, where that is to be learned.
        restore: puts buffers and random state back to where they were before the forward.
        returned: watches what the forward returned.
        thread: that started it.
        node: its autograd node, once the forward has returned.
        arena: holds what its forward has moved to other tiers.
        inside: the optimizer that is in its model's steps.
        updating: what its backward updates, if it does.
        capture: of the step. AOTAutograd compiles a backward when it first comes, also after the model is let go.
    """

    executable: Executable | None
    home: Flights
    slot: Slot = NO_SLOT
    inputs: Sequence[StorageWatch] = ()
    expects: frozenset[Slot] = frozenset()
    meanwhile: set[Slot] = field(default_factory=set[Slot])
    hooked: bool = False
    number: int = field(default_factory=_numbers.__next__)
    ran: bool = False
    gauge: StepGauge | None = None
    between: BetweenGauge | None = None
    restore: Callable[[], None] | None = None
    returned: list[StorageWatch] = field(default_factory=list[StorageWatch])
    capture: object = None
    arena: Arena | None = None
    inside: OptimizerInBackward | None = None
    updating: BackwardUpdates | None = None
    node: weakref.ref[Any] | None = None
    thread: int = field(default_factory=threading.get_ident)

    @property
    def name(self) -> int:
        """What its ticket says."""
        return ANY_FLIGHT if self.hooked else self.number

    @property
    def proves(self) -> bool:
        """Whether its executable is being proven on it."""
        return self.executable is not None and self.executable.first_runs.proving == self.name

    def take_off(self, outputs: object) -> None:
        """The forward has returned ``outputs``: in the air until the backward begins or the graph is gone."""
        tensors = list(returned_tensors(outputs))
        self.returned = watches_of(tensors)
        node = _own_node(tensors)
        if node is None or self.hooked:
            self.home.backwards += 1
        if node is None:
            leave(self.returned)
            self.home.unseen.append(self)
            return
        _with_node[self.number] = _keeping[self.number] = self.home.in_the_air[self.number] = self
        self.node = weakref.ref(node)
        weakref.finalize(node, _end, self.number).atexit = False
        node.register_prehook(_refuse_autocast)
        node.register_prehook(functools.partial(_refuse_other_products, _products()))
        node.register_prehook(note_arrived)
        if self.executable is not None:
            node.register_prehook(functools.partial(keep_order, weakref.ref(node), self.executable.code.gradient_order))
        node.register_hook(refuse_second_derivative)
        if not self.hooked:  # whose hooks would unpack everything once more
            node.register_prehook(functools.partial(_refuse_changed_inputs, weakref.ref(node)))

    def land(self, *, retained: bool = False) -> None:
        """Its backward begins, or its graph is gone. Once it keeps nothing, what lives of its outputs is left over."""
        self.home.in_the_air.pop(self.number, None)
        if not retained and _keeping.pop(self.number, None) is not None:
            leave(self.returned)
            self.returned = []

    def give_up(self) -> None:
        """It came to nothing: its forward raised, or its graph is gone."""
        executable = self.executable
        if executable is not None and executable.first_runs.proving == self.name:
            executable.first_runs.proving = None
        self.land()
        self.stop_learning()
        if self.arena is not None:
            self.arena.close()

    def disturb(self) -> None:
        """Definition 3."""
        self.gauge = self.restore = None
        self.stop_learning()

    def stop_learning(self) -> None:
        """What user code takes from here on is not measured."""
        if self.between is not None:
            self.between.end()
            self.between = None


class Learner(Protocol):
    """What is known of a model that its flights are flights of (``known_windows.KnownWindows``)."""

    def expects_forwards(self, slot: Slot) -> bool:
        """Whether another forward is known to start before the backward of a call of ``slot``."""
        ...

    def learn_forward(self, slot: Slot, other: Slot, between: Any) -> None:
        """A call of ``other`` starts before the backward of one of ``slot``."""
        ...

    def learn_together(self, slot: Slot, other: Slot) -> None:
        """A call of ``slot`` and one of ``other``, which started later, train together."""
        ...

    def learn_retained(self, slot: Slot, *, again: bool) -> bool:
        """A backward of a call of ``slot`` retains its graph, or comes ``again``; whether that is news."""
        ...


class Flights:
    """The flights of one model that are in the air, by number.

    Args:
        knowledge: of the model.

    Attributes:
        backwards: that have begun; of flights that their backwards may not name, that have taken off.
    """

    def __init__(self, knowledge: Learner | None = None) -> None:
        self.knowledge = knowledge
        self.backwards = 0
        self.in_the_air: dict[int, Flight] = {}
        # Flights whose node was not found in what the forward returned: their executables are needed all the same.
        self.unseen: deque[Flight] = deque(maxlen=_MOST_UNSEEN)

    def __bool__(self) -> bool:
        return bool(self.in_the_air)

    def disturb(self) -> None:
        """A forward of the model starts, or the model is not fitted any more."""
        for each in list(self.in_the_air.values()):
            each.disturb()


def _keepers() -> list[Flight]:
    """All that keep what they saved (definition 2)."""
    for each in list(_keeping.values()):
        if each.node is not None and each.node() is None:
            _with_node.pop(each.number, None)
            each.give_up()
    return list(_keeping.values())


def aloft(home: Flights) -> list[Flight]:
    """Flights in the air, the first of them first: all of one model, and those of others that this thread started."""
    here = threading.get_ident()
    return [
        each
        for each in _keepers()
        if (each.home is home or each.thread == here) and each.number in each.home.in_the_air
    ]


def kept_bytes() -> int:
    """What flights of all models keep (definition 2)."""
    return sum(each.executable.leaves_bytes for each in _keepers() if each.executable is not None)


def kept_inputs() -> dict[int, int]:
    """Bytes of the arguments that they were called with, as far as they live still, by key of the storage."""
    watches = (watch for each in _keepers() for watch in each.inputs)
    return {watch.key: watch.bytes for watch in watches if watch.alive}


def learn_together(flight: Flight | None) -> None:
    """A backward begins, of ``flight`` if it can be told: tell models which forwards train together."""
    for each in list(_keeping.values()):
        for other in each.meanwhile if flight is None or each is flight else each.meanwhile & {flight.slot}:
            if each.home.knowledge is not None:
                each.home.knowledge.learn_together(each.slot, other)


def flight_numbered(number: int) -> Flight | None:
    """The flight of that number, if its node is alive."""
    return _with_node.get(number)


def flights_of(executable: Executable) -> list[Flight]:
    """All in the air that run the code of ``executable``."""
    return [
        each
        for each in _keepers()
        if each.executable is not None
        and each.executable.code is executable.code
        and each.number in each.home.in_the_air
    ]


def _end(number: int) -> None:
    """The node of a flight is gone. Runs wherever the last reference goes, so it must not raise."""
    flight = _with_node.pop(number, None)
    if flight is not None:
        flight.give_up()


def _refuse_autocast(gradients: tuple[torch.Tensor | None, ...]) -> None:
    """Refuse a backward inside of ``torch.autocast``, where eager would cast what the captured backward does not.

    Asked before the step's node runs: AOTAutograd turns autocast off around a captured backward.
    """
    device = next((each.device.type for each in gradients if each is not None), "cpu")
    if torch.is_autocast_enabled(device):
        raise CaptureError(
            "backward() was called inside of torch.autocast, and the step was captured for a backward outside of it. "
            "No gradient of this step was handed out",
            remedy="leave the autocast block before loss.backward(), as PyTorch advises",
        )


def _products() -> tuple[object, ...]:
    """Settings by which kernels compute products of float32, and what they take for that."""
    return (*product_precisions(), bool(torch.backends.mkldnn.enabled))


def _refuse_other_products(forward: tuple[object, ...], _: Any) -> None:
    """Refuse a backward whose products are computed otherwise than its forward's.

    What runs again would have other bits than eager's forward gave, and the plan counts on what the forward's kernels
    take.
    """
    if _products() != forward:
        raise CaptureError(
            "how products of float32 are computed (torch.set_float32_matmul_precision, "
            "torch.backends.*.fp32_precision, torch.backends.mkldnn.enabled) has been changed between the forward and "
            f"its backward, from {_told(forward)} to {_told(_products())}, and the step was planned for one. No "
            "gradient of this step was handed out",
            remedy="change it between steps: each setting has a plan of its own",
        )


def _told(settings: tuple[object, ...]) -> str:
    return ", ".join(map(str, settings))


def _refuse_changed_inputs(node: weakref.ref[Any], _: Any) -> None:
    """Say whose doing it is that something saved was written to since, before autograd says that it was."""
    try:
        saved_by(node())
    except RuntimeError as error:
        said = _CHANGED.search(str(error))
        if said is None:
            return  # autograd has the word
        raise CaptureError(
            f"an input, parameter or buffer of the step, a {said[1]}, has been modified by an inplace operation "
            "between its forward and its backward, which computes with what it was; where eager does not, it has kept "
            "what followed from it. No gradient of this step was handed out",
            remedy="write to it after the backward (copy_ into a static batch, buffers that follow the weights), or "
            "give the forward a copy (x.clone())",
        ) from error


def returned_tensors(outputs: object, depth: int = 2) -> Iterator[torch.Tensor]:
    """Tensors of what a forward returned, in objects that torch's containers do not know as well."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and not isinstance(leaf, type | torch.nn.Module):
            slots = (vars(kind).get("__slots__", ()) for kind in type(leaf).__mro__)
            names = (name for each in slots for name in ((each,) if isinstance(each, str) else each))
            held = [getattr(leaf, name, None) for name in names if name not in {"__dict__", "__weakref__"}]
            for value in (*held, *getattr(leaf, "__dict__", {}).values()):
                yield from returned_tensors(value, depth - 1)


def _own_node(outputs: list[torch.Tensor]) -> Any:
    """The node of the step itself in the graph of what its forward returned: views of its results hang below it."""
    nodes: list[Any] = [each.grad_fn for each in outputs if each.grad_fn is not None]
    seen: set[Any] = set()
    for node in nodes:
        if is_function_node(node):
            return node
        if node not in seen:
            seen.add(node)
            nodes.extend(below for below, _ in node.next_functions if below is not None)
    return None

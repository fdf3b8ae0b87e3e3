"""Pending steps: forwards whose backward has not come.

1. A step is *pending* from its forward until its backward begins or its autograd node is gone; the node is what knows,
   since user code may drop the outputs or keep them. A backward that retains its graph leaves the step *retained*,
   until another backward does not or the node is gone.
2. What a pending or retained step keeps (``Executable.leaves_bytes``) is resident for whatever starts meanwhile.
   Ctrl-C may come in the finalizer that says that the node is gone; whoever looks for pending steps sees to those.
3. A pending step that another forward of its model joins is *disturbed*: nothing is measured in it any more, and a
   failed proof puts nothing back.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ebbtide.cost.cache import product_precisions
from ebbtide.engine.clearing import Clearing
from ebbtide.engine.derivatives import refuse_second_derivative
from ebbtide.engine.executable import Executable
from ebbtide.engine.hook_order import keep_order
from ebbtide.engine.key import CallSlot
from ebbtide.engine.known_windows import Cleared, KnownWindows
from ebbtide.engine.retained import Retained
from ebbtide.engine.shared_gradients import SharedGradients, watch_sums
from ebbtide.engine.step_handles import ANY_STEP
from ebbtide.engine.unused import note_arrived
from ebbtide.engine.user_window import UserWindow
from ebbtide.errors import CaptureError
from ebbtide.faults import users_level
from ebbtide.measurement.leftovers import leave, watches_of
from ebbtide.measurement.peak import StepGauge
from ebbtide.measurement.step_record import Before, Recorder
from ebbtide.optimizer.in_step.backward_updates import BackwardUpdates
from ebbtide.optimizer.in_step.optimizer_in_backward import OptimizerInBackward
from ebbtide.ranks.backwards import StepBackward
from ebbtide.torch_seams.autograd import is_function_node, saved_by
from ebbtide.torch_seams.storages import StorageWatch
from ebbtide.torch_seams.trees import tree_leaves
from ebbtide.transfers.arena import Arena
from ebbtide.units import format_allowed, format_bytes
from ebbtide.user_objects import attributes_of, elements_of, is_a

__all__ = [
    "Meets",
    "PendingStep",
    "PendingSteps",
    "disturb_step_of",
    "in_flight_beside",
    "kept_bytes",
    "kept_inputs",
    "learn_cleared",
    "learn_overlap",
    "learn_retained",
    "learn_together",
    "most_left_bytes",
    "pending_around",
    "pending_step",
    "pending_steps_of",
    "returned_tensors",
]

_MOST_UNSEEN = 64
_CHANGED = re.compile(r"modified by an inplace operation: \[([^\]]*\])")
_numbers = itertools.count(1)  # 0 is step_handles.ANY_STEP
# Of all models, by number: those whose autograd node is alive, and of these the ones that keep what they saved. Who
# collects losses keeps thousands of nodes alive: only the second is ever walked.
_with_node: dict[int, PendingStep] = {}
_keeping: dict[int, PendingStep] = {}


_NO_SLOT = CallSlot(None, 0)


@dataclass(slots=True)
class Overlap:
    """Which calls start between a forward and its backward.

    Attributes:
        call_slot: key of the step's own call, and how many steps of its model were pending when it started.
        planned_for: slots of the calls that the plan has room for.
        started_since: slots of those that have started.
    """

    call_slot: CallSlot = _NO_SLOT
    planned_for: frozenset[CallSlot] = frozenset()
    started_since: set[CallSlot] = field(default_factory=set[CallSlot])


@dataclass(slots=True)
class Holdings:
    """What a pending step keeps alive or watches.

    Attributes:
        capture: of the step. AOTAutograd compiles a backward when it first comes, also after the model is let go.
        inputs: watches the arguments of its call, which are saved for the backward whoever else drops them.
        returned: watches what the forward returned.
        arena: holds what its forward has moved to other tiers.
    """

    capture: object = None
    inputs: Sequence[StorageWatch] = ()
    returned: list[StorageWatch] = field(default_factory=list[StorageWatch])
    arena: Arena | None = None


@dataclass(slots=True)
class Measuring:
    """What is found out while a step runs; a disturbed step gives all of it up.

    Attributes:
        gauge: records the peak of the step.
        record: of the whole step's bytes.
        restore: puts buffers and random state back to where they were before the forward.
    """

    gauge: StepGauge | None = None
    record: Recorder | None = None
    restore: Callable[[], None] | None = None

    def end_record(self) -> None:
        """What is taken from here on is not recorded."""
        if self.record is not None:
            self.record.end()
            self.record = None

    def give_up(self) -> None:
        """Measure nothing any more (definition 3)."""
        self.gauge = self.restore = None
        self.end_record()


@dataclass(slots=True)
class Meets:
    """What a backward meets on its way.

    Attributes:
        optimizer: that runs in the backward of its model's steps.
        updates: what it updates, if it does.
        exchange: other ranks; ``None`` outside of a DistributedDataParallel of several.
        clearing: tells whether gradients of earlier steps go before it; ``None`` once that is known.
        sums: watches gradients that it adds up, the first time that its code runs.
    """

    optimizer: OptimizerInBackward | None = None
    updates: BackwardUpdates | None = None
    exchange: StepBackward | None = None
    clearing: Clearing | None = None
    sums: SharedGradients | None = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class PendingStep:
    """One forward and its backward.

    Attributes:
        executable: what runs; ``None`` while a compiled step is asked whether its guards hold.
        siblings: the pending steps of its model.
        overlap: calls that start while it is pending.
        holdings: what it keeps.
        meets: what its backward meets.
        hooked: whether saved-tensor hooks were active, so that its handle does not name it.
        number: names it.
        measuring: what is found out in it.
        ran: whether the forward ran.
        node: its autograd node, once the forward has returned.
        thread: that started it.
    """

    executable: Executable | None
    siblings: PendingSteps
    overlap: Overlap = field(default_factory=Overlap)
    holdings: Holdings = field(default_factory=Holdings)
    meets: Meets = field(default_factory=Meets)
    hooked: bool = False
    number: int = field(default_factory=_numbers.__next__)
    measuring: Measuring = field(default_factory=Measuring)
    ran: bool = False
    node: weakref.ref[Any] | None = None
    thread: int = field(default_factory=threading.get_ident)

    @property
    def handle(self) -> int:
        """The number that the backward reads from what the forward saved (``step_handles``)."""
        return ANY_STEP if self.hooked else self.number

    @property
    def is_pending(self) -> bool:
        """Whether its forward has returned and its backward has not begun."""
        return self.number in self.siblings.by_number

    @property
    def proves(self) -> bool:
        """Whether its executable is being proven on it."""
        return self.executable is not None and self.executable.first_runs.proving == self.handle

    def register(self, outputs: object) -> None:
        """The forward has returned ``outputs``: pending until the backward begins or the graph is gone."""
        tensors = list(returned_tensors(outputs))
        returned = self.holdings.returned = watches_of(tensors)
        node = _own_node(tensors)
        if node is None or self.hooked:
            self.siblings.backwards += 1
        if node is None:
            leave(returned)
            self.siblings.without_node.append(self)
            return
        _with_node[self.number] = _keeping[self.number] = self.siblings.by_number[self.number] = self
        self.node = weakref.ref(node)
        weakref.finalize(node, _abandon_dead, self.number).atexit = False
        if self.meets.exchange is not None:
            node.register_prehook(self.meets.exchange.begins)
        node.register_prehook(_refuse_autocast)
        node.register_prehook(functools.partial(_refuse_other_products, _products()))
        node.register_prehook(note_arrived)
        if self.executable is not None:
            node.register_prehook(functools.partial(keep_order, weakref.ref(node), self.executable.code.gradient_order))
            siblings = self.siblings
            self.meets.sums = watch_sums(node, self.executable.code, lambda: siblings.backwards)
        node.register_hook(refuse_second_derivative)
        if self.meets.updates is not None and self.meets.optimizer is not None:
            self.meets.optimizer.scaled_losses.add(node)
        if not self.hooked:  # whose hooks would unpack everything once more
            node.register_prehook(functools.partial(_refuse_changed_inputs, weakref.ref(node)))

    def retire(self, *, retained: bool = False) -> None:
        """Its backward begins, or its graph is gone. Once it keeps nothing, what lives of its outputs is left over."""
        self.siblings.by_number.pop(self.number, None)
        if not retained and _keeping.pop(self.number, None) is not None:
            leave(self.holdings.returned)
            self.holdings.returned = []

    def abandon(self) -> None:
        """It came to nothing: its forward raised, or its graph is gone."""
        executable = self.executable
        if executable is not None and executable.first_runs.proving == self.handle:
            executable.first_runs.proving = None
        self.retire()
        self.meets.clearing = None
        self.measuring.end_record()
        if self.meets.sums is not None:
            self.meets.sums.end()
        if self.holdings.arena is not None:
            self.holdings.arena.close()


class PendingSteps:
    """The pending steps of one model.

    Args:
        knowledge: of the model.

    Attributes:
        backwards: how many have begun; of steps that their backwards may not name, how many forwards have returned.
        by_number: the steps that are pending.
        without_node: steps whose node was not found in what the forward returned. Their executables are needed all the
            same.
    """

    def __init__(self, knowledge: KnownWindows | None = None) -> None:
        self.knowledge = knowledge
        self.backwards = 0
        self.by_number: dict[int, PendingStep] = {}
        self.without_node: deque[PendingStep] = deque(maxlen=_MOST_UNSEEN)

    def __bool__(self) -> bool:
        return bool(self.by_number)

    def disturb(self, number: int = 0) -> Before:
        """A forward of the model starts, that of step ``number``, or the model is not fitted any more.

        Returns:
            what is known of the blocks of the others.
        """
        before = Before(number)
        for each in list(self.by_number.values()):
            if (record := each.measuring.record) is not None and (found := record.end_for(number)).recorded:
                before = found
            each.measuring.give_up()
        return before


def _keepers() -> list[PendingStep]:
    """Pending and retained steps of all models."""
    for each in list(_keeping.values()):
        if each.node is not None and each.node() is None:
            _with_node.pop(each.number, None)
            each.abandon()
    return list(_keeping.values())


def pending_around(siblings: PendingSteps) -> list[PendingStep]:
    """Pending steps, the oldest first: all of one model, and those of others that this thread started."""
    here = threading.get_ident()
    return [each for each in _keepers() if (each.siblings is siblings or each.thread == here) and each.is_pending]


def kept_bytes() -> int:
    """What pending steps of all models keep (definition 2)."""
    return sum(each.executable.leaves_bytes for each in _keepers() if each.executable is not None)


def kept_inputs() -> dict[int, int]:
    """Bytes of the arguments that they were called with, as far as they live still, by key of the storage."""
    watches = (watch for each in _keepers() for watch in each.holdings.inputs)
    return {watch.key: watch.bytes for watch in watches if watch.alive}


def learn_overlap(pending: PendingStep, before: list[PendingStep]) -> None:
    """``pending`` has started while those of ``before`` were pending, the first of them first: tell their models."""
    executable = pending.executable
    assert executable is not None
    plan, needs = executable.plan, executable.needs_bytes
    least = plan.smallest_bytes - plan.resident_bytes - plan.reserve_bytes
    for earlier in before:
        earlier.overlap.started_since.add(pending.overlap.call_slot)
    for earlier, _, besides in _besides(pending.holdings.inputs, before):
        if earlier.siblings.knowledge is not None:
            proof = besides + plan.reserve_bytes  # it may be proven again and again, by other plans
            found = UserWindow(proof + needs, besides + executable.leaves_bytes, proof + min(least, needs))
            earlier.siblings.knowledge.learn_forward(earlier.overlap.call_slot, pending.overlap.call_slot, found)


def _besides(
    inputs: Sequence[StorageWatch], before: Sequence[PendingStep]
) -> Iterator[tuple[PendingStep, Executable, int]]:
    """Pending steps, the last first, and what comes between their graphs beside a forward with these ``inputs``."""
    others = 0
    for earlier in reversed(before):
        if earlier.executable is not None:
            shared = {each.key for each in earlier.holdings.inputs}
            own = sum(each.bytes for each in inputs if each.key not in shared)
            yield earlier, earlier.executable, others + own
            others += earlier.executable.leaves_bytes


def in_flight_beside(inputs: Sequence[StorageWatch], before: Sequence[PendingStep]) -> Iterator[tuple[Executable, int]]:
    """What runs the steps of ``before``, and what comes between their graphs beside a forward with these ``inputs``."""
    return ((executable, besides) for _, executable, besides in _besides(inputs, before))


def most_left_bytes(slot: CallSlot, inputs: Sequence[StorageWatch], before: Sequence[PendingStep]) -> int | None:
    """What a call of ``slot`` may keep for its backward, by the plans of ``before`` that have room for it.

    ``None`` if there are none.
    """
    expecting = [each for each in _besides(inputs, before) if slot in each[0].overlap.planned_for]
    return min((executable.most_held_bytes - besides for _, executable, besides in expecting), default=None)


def learn_retained(pending: PendingStep, *, again: bool) -> None:
    """The backward of ``pending`` retains its graph, or comes ``again`` through it: later steps leave room for that."""
    executable, knowledge = pending.executable, pending.siblings.knowledge
    if executable is None or knowledge is None or not knowledge.learn_retained(pending.overlap.call_slot, again=again):
        return
    plan = executable.plan
    program = plan.program
    total = plan.resident_bytes + executable.needs_with(
        program.between_bytes, program.held_bytes, Retained(again=again)
    )
    if total > plan.budget_bytes:
        warnings.warn(
            "this backward retains its graph (retain_graph or create_graph), so what was saved for it stays: this step "
            f"may take {format_bytes(total)}, over its budget of {format_allowed(plan.budget_bytes)}; from the next "
            "step on that is planned for, if there is room",
            stacklevel=users_level(),
        )


def learn_cleared(pending: PendingStep) -> None:
    """The backward of ``pending`` begins: tell whether old gradients were cleared, and say it if they were to be."""
    clearing, pending.meets.clearing = pending.meets.clearing, None
    executable, knowledge = pending.executable, pending.siblings.knowledge
    if clearing is None or executable is None or knowledge is None:
        return
    found = clearing.found()
    if found is None:
        return
    knowledge.learn_cleared(pending.overlap.call_slot, found)
    counted_on = executable.validity.cleared_bytes
    if found is Cleared.KEPT and counted_on:
        plan = executable.plan
        total = plan.resident_bytes + executable.needs_with(
            plan.program.between_bytes, plan.program.held_bytes + counted_on
        )
        if total > plan.budget_bytes:
            warnings.warn(
                "gradients of earlier steps are there in this backward, which were cleared between forward and "
                f"backward before: this step may take {format_bytes(total)}, over its budget of "
                f"{format_allowed(plan.budget_bytes)}. From the next step on they are planned for, if there is room",
                stacklevel=users_level(),
            )


def learn_together(pending: PendingStep | None) -> None:
    """A backward begins, of ``pending`` if it can be told: tell models which forwards train together."""
    for each in list(_keeping.values()):
        knowledge, others = each.siblings.knowledge, each.overlap.started_since
        if knowledge is None:
            continue
        if pending is not None and each is not pending:
            others = others & {pending.overlap.call_slot}
        for other in others:
            knowledge.learn_together(each.overlap.call_slot, other)


def pending_step(number: int) -> PendingStep | None:
    """The step of that number, if its node is alive."""
    return _with_node.get(number)


def disturb_step_of(node: Any) -> None:
    """The backward of the step of ``node`` is refused: nothing is measured in it any more."""
    for each in list(_with_node.values()):
        if each.node is not None and each.node() is node:
            each.measuring.give_up()


def pending_steps_of(executable: Executable) -> list[PendingStep]:
    """All pending steps that run the code of ``executable``."""
    return [
        each
        for each in _keepers()
        if each.executable is not None and each.executable.code is executable.code and each.is_pending
    ]


def _abandon_dead(number: int) -> None:
    """The node of a step is gone. Runs wherever the last reference goes, so it must not raise."""
    pending = _with_node.pop(number, None)
    if pending is not None:
        pending.abandon()


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
            f"its backward, from {_in_words(forward)} to {_in_words(_products())}, and the step was planned for one. "
            "No gradient of this step was handed out",
            remedy="change it between steps: each setting has a plan of its own",
        )


def _in_words(settings: tuple[object, ...]) -> str:
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
        if is_a(leaf, torch.Tensor):
            yield leaf
        elif depth and not is_a(leaf, type, torch.nn.Module):
            inside = elements_of(leaf)
            for value in (*(inside[1] if inside else ()), *attributes_of(leaf).values()):
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

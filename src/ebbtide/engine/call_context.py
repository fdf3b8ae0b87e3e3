"""What surrounds a training call: what its plan depends on besides its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ebbtide.engine.compiled import Call
from ebbtide.engine.key import CallSlot, Code, key_of, modes_of
from ebbtide.engine.known_windows import Cleared, KnownWindows
from ebbtide.engine.pending_steps import PendingStep, PendingSteps, kept_bytes, kept_inputs, pending_around
from ebbtide.engine.traced_graph import ALLOCATOR_GRANULARITY_BYTES
from ebbtide.measurement.resident import gradient_bytes, start_bytes, watched_in
from ebbtide.torch_seams.autograd import has_saved_tensor_hooks, in_backward
from ebbtide.torch_seams.data_parallel import bucket_bytes
from ebbtide.torch_seams.storages import StorageWatch, walk

__all__ = ["CallContext", "observe"]


@dataclass(frozen=True, slots=True)
class CallContext:
    """What :func:`observe` has seen before a call.

    Attributes:
        call_slot: key of the call, and how many of the model's forwards are pending (``between``).
        modes: what of the key does not depend on the arguments.
        trained: per parameter whether it takes a gradient.
        accumulating: whether every parameter that takes a gradient has one, as far as is known also in the backward.
        module: whose call it is.
        inputs: watches its arguments; empty on CUDA, where the allocator knows.
        device: ``"cpu"`` or ``"cuda"``.
        resident_bytes: before the forward, what pending steps keep among them.
        reached: keys of the storages that were counted as the model's, one by one.
        pending: pending steps (``pending_steps.pending_around``).
        flying_bytes: what they keep.
        hooked: whether saved-tensor hooks are active, as in a checkpoint.
        repeated: whether a backward is running, so that this is a checkpoint's repetition of a forward.
        hooks: on parameters.
        updates: whether its backward applies gradients (``inside``).
        cleared: what is known of the gradients that are there (``known_windows``).
        gradient_bytes: theirs, where somebody may clear them before the backward.
    """

    call_slot: CallSlot
    modes: object
    trained: bytes
    accumulating: bool
    module: torch.nn.Module
    inputs: tuple[StorageWatch, ...]
    device: str
    resident_bytes: int
    reached: frozenset[int]
    pending: tuple[PendingStep, ...]
    flying_bytes: int
    hooked: bool
    repeated: bool
    hooks: tuple[int, ...]
    updates: bool = False
    cleared: Cleared = Cleared.NEVER_SEEN
    gradient_bytes: int = 0

    @property
    def key(self) -> object:
        """The key of the call."""
        return self.call_slot.key

    @property
    def checkpointed(self) -> bool:
        """Whether somebody else's checkpoint or offload may be around this call."""
        return self.hooked or self.repeated

    @property
    def was_expected(self) -> bool:
        """Whether all forwards in flight are planned with room for a call like this."""
        return all(self.call_slot in each.overlap.planned_for for each in self.pending)


def observe(
    call: Call,
    *,
    number: int,
    code: Code,
    siblings: PendingSteps,
    windows: KnownWindows,
    optimizers: Sequence[torch.optim.Optimizer],
    gradients_stay: bool,
    updates: bool,
) -> CallContext:
    """Look at what surrounds ``call``, once before anything of it runs.

    Args:
        call: of a fitted model.
        number: of the model.
        code: the functions of the model's classes.
        siblings: the pending steps of the model.
        windows: what is known of the user windows of its steps.
        optimizers: whose state counts.
        gradients_stay: whether gradients that are there now may be cleared before the backward.
        updates: whether its backward applies gradients.
    """
    on_cpu = call.device == "cpu"
    inputs = watched_in([call.args, call.kwargs]) if on_cpu else []
    others = {**kept_inputs(), **{each.key: each.bytes for each in inputs}}
    trained, accumulating, own, classes, hooks = walk(call.module)
    resident = start_bytes(own, optimizers, others, call.device)
    flying = pending_around(siblings)
    modes = (modes_of(call.module, call.device, trained), code.of(classes))
    slot = CallSlot(key_of(modes, call.args, call.kwargs), len(siblings.by_number), number)
    hooked, repeated = has_saved_tensor_hooks(), in_backward()
    alone = not (gradients_stay or updates or hooked or repeated)
    cleared = windows.cleared(slot) if alone else Cleared.KEPT
    expected = cleared in (Cleared.ASKED, Cleared.SEEN)
    may_go = expected or (accumulating and cleared is not Cleared.KEPT)
    return CallContext(
        call_slot=slot,
        modes=modes,
        trained=trained,
        accumulating=accumulating and not (gradients_stay or expected),
        module=call.module,
        inputs=tuple(inputs),
        device=call.device,
        # On CUDA what is pending is counted already.
        resident_bytes=resident + kept_bytes() + bucket_bytes(call.module) if on_cpu else resident,
        reached=frozenset(own) if on_cpu else frozenset(),
        pending=tuple(flying),
        flying_bytes=sum(each.executable.leaves_bytes for each in flying if each.executable is not None),
        hooked=hooked,
        repeated=repeated,
        hooks=hooks,
        updates=updates,
        cleared=cleared,
        gradient_bytes=gradient_bytes(call.module, ALLOCATOR_GRANULARITY_BYTES[call.device]) if may_go else 0,
    )

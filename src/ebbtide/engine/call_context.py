"""What surrounds a training call: what its plan depends on besides its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ebbtide.engine.compiled import Call
from ebbtide.engine.flights import Flight, Flights, aloft, kept_bytes, kept_inputs
from ebbtide.engine.key import Code, Slot, key_of, modes_of
from ebbtide.measurement.resident import start_bytes, watched_in
from ebbtide.torch_seams.autograd import has_saved_tensor_hooks, in_backward
from ebbtide.torch_seams.data_parallel import bucket_bytes
from ebbtide.torch_seams.storages import StorageWatch, walk

__all__ = ["CallContext", "observe"]


@dataclass(frozen=True, slots=True)
class CallContext:
    """What :func:`observe` has seen before a call.

    Attributes:
        slot: key of the call, and how many of the model's forwards are in the air (``between``).
        modes: what of the key does not depend on the arguments.
        trained: per parameter whether it takes a gradient.
        accumulating: whether every parameter that takes a gradient has one.
        module: whose call it is.
        inputs: watches its arguments; empty on CUDA, where the allocator knows.
        device: ``"cpu"`` or ``"cuda"``.
        resident_bytes: before the forward, what flights keep among them.
        reached: keys of the storages that were counted as the model's, one by one.
        aloft: forwards in flight (``flights.aloft``).
        flying_bytes: what they keep.
        hooked: whether saved-tensor hooks are active, as in a checkpoint.
        repeated: whether a backward is running, so that this is a checkpoint's repetition of a forward.
        hooks: on parameters.
        updates: whether its backward applies gradients (``inside``).
    """

    slot: Slot
    modes: object
    trained: bytes
    accumulating: bool
    module: torch.nn.Module
    inputs: tuple[StorageWatch, ...]
    device: str
    resident_bytes: int
    reached: frozenset[int]
    aloft: tuple[Flight, ...]
    flying_bytes: int
    hooked: bool
    repeated: bool
    hooks: tuple[int, ...]
    updates: bool = False

    @property
    def key(self) -> object:
        """Of the call."""
        return self.slot.key

    @property
    def checkpointed(self) -> bool:
        """Whether somebody else's checkpoint or offload may be around this call."""
        return self.hooked or self.repeated

    @property
    def was_expected(self) -> bool:
        """Whether all forwards in flight are planned with room for a call like this."""
        return all(self.slot in each.expects for each in self.aloft)


def observe(
    call: Call,
    *,
    number: int,
    code: Code,
    flights: Flights,
    optimizers: Sequence[torch.optim.Optimizer],
    gradients_stay: bool,
    updates: bool,
) -> CallContext:
    """Look at what surrounds ``call``, once before anything of it runs.

    Args:
        call: of a fitted model.
        number: of the model.
        code: the functions of the model's classes.
        flights: of the model.
        optimizers: whose state counts.
        gradients_stay: whether gradients that are there now may be cleared before the backward.
        updates: whether its backward applies gradients.
    """
    on_cpu = call.device == "cpu"
    inputs = watched_in([call.args, call.kwargs]) if on_cpu else []
    others = {**kept_inputs(), **{each.key: each.bytes for each in inputs}}
    trained, accumulating, own, classes, hooks = walk(call.module)
    resident = start_bytes(own, optimizers, others, call.device)
    flying = aloft(flights)
    modes = (modes_of(call.module, call.device, trained), code.of(classes))
    return CallContext(
        slot=Slot(key_of(modes, call.args, call.kwargs), len(flights.in_the_air), number),
        modes=modes,
        trained=trained,
        accumulating=accumulating and not gradients_stay,
        module=call.module,
        inputs=tuple(inputs),
        device=call.device,
        # On CUDA what is in the air is counted already.
        resident_bytes=resident + kept_bytes() + bucket_bytes(call.module) if on_cpu else resident,
        reached=frozenset(own) if on_cpu else frozenset(),
        aloft=tuple(flying),
        flying_bytes=sum(each.executable.leaves_bytes for each in flying if each.executable is not None),
        hooked=has_saved_tensor_hooks(),
        repeated=in_backward(),
        hooks=hooks,
        updates=updates,
    )

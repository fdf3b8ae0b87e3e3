"""What is resident before a call of a fitted model, by kind: for refusals, and for plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ebbtide.engine.call_context import CallContext
from ebbtide.engine.pending_steps import kept_bytes
from ebbtide.engine.step import Step
from ebbtide.engine.traced_graph import ALLOCATOR_GRANULARITY_BYTES
from ebbtide.measurement.resident import GRADIENTS, resident_parts, tensors_in
from ebbtide.step.resident_in_words import OPTIMIZER_STATE
from ebbtide.torch_seams.data_parallel import bucket_bytes

__all__ = ["GRADIENTS", "GRADIENTS_TO_COME", "STATE", "resident_by_kind", "without_pending"]

STATE = OPTIMIZER_STATE
GRADIENTS_TO_COME = "gradients that will stay"
_FLIGHTS = "kept by forwards whose backward has not come"
_BUCKETS = "buckets of DistributedDataParallel"
_HIDDEN = "tensors that the step reads from elsewhere"
_LEFT = "batches of data loaders, what earlier calls returned, and constants"


def resident_by_kind(
    step: Step,
    now: CallContext,
    arguments: object,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    to_come: Mapping[str, int],
    resident_bytes: int,
) -> dict[str, int]:
    """What ``resident_bytes`` are made of; what is left out is of no kind that is known.

    On a CPU the rest is what still lives of what fitted models have returned and data loaders have given: nothing else
    is counted there. On a card it may be anybody's.

    Args:
        step: that is to run.
        now: what surrounds the call.
        arguments: of it.
        optimizers: whose state counts.
        to_come: what is counted that is not there yet, by kind.
        resident_bytes: with that.
    """
    granularity = ALLOCATOR_GRANULARITY_BYTES[now.device]
    state = tensors_in(optimizers)
    parts = resident_parts(now.module, arguments, state, granularity, device=now.device)
    parts[_FLIGHTS] = kept_bytes()
    if now.device == "cpu":
        parts[_BUCKETS] = bucket_bytes(now.module)
        parts[_HIDDEN] = step.piece.hidden_bytes(now.reached)
    for kind, size in to_come.items():
        parts[kind] = parts.get(kind, 0) + size
    if now.device == "cpu":
        parts[_LEFT] = resident_bytes - sum(parts.values())
    return {kind: size for kind, size in parts.items() if size}


def without_pending(parts: Mapping[str, int], flying_bytes: int) -> dict[str, int]:
    """``parts`` where so many bytes of forwards in flight do not count."""
    return {**parts, _FLIGHTS: parts.get(_FLIGHTS, 0) - flying_bytes}

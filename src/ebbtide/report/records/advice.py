"""What would lower the floor, from what the floor is made of. A rule speaks only where its bytes are there.

A rule's bytes are what it is about, hence the most that it can take off; the next moment may pin the floor earlier.
Rules say what to change in the model or its call: no plan gets below the floor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ebbtide.planners.bounds.floor_parts import Floor, Part
from ebbtide.step.program import Program
from ebbtide.units import format_bytes

__all__ = ["SCALAR_BYTES", "Advice", "advise"]

SCALAR_BYTES = 512  # the largest block that an allocator takes for a scalar (CUDACachingAllocator: kMinBlockSize)
DOMINANT = 0.5  # of the floor: this part decides it
NOTICEABLE = 0.1  # of the floor: worth a line
_LOSSES = ("log_softmax", "nll_loss", "cross_entropy")


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing that would lower the floor.

    Attributes:
        rule: its name: ``loss_in_chunks``, ``activation``, ``workspace``, ``gradients``, ``outputs``,
            ``loss_outside``, ``single_run``, ``before_change`` or ``resident``.
        bytes: what it is about.
        text: what is so, and what to do.
    """

    rule: str
    bytes: int
    text: str


def advise(program: Program, floor: Floor, resident_bytes: int, optimizer: str = "") -> tuple[Advice, ...]:
    """All that applies, the most bytes first.

    Args:
        program: whose floor it is.
        floor: taken apart.
        resident_bytes: at the step's start, besides the floor.
        optimizer: class of the one whose state is in them, if any.
    """
    found = [
        *_of_the_op(program, floor),
        *_gradients(program, floor),
        *_about_kept(floor),
        *_resident(floor, resident_bytes, optimizer),
    ]
    return tuple(sorted(found, key=lambda each: (-each.bytes, each.rule)))


def _of_the_op(program: Program, floor: Floor) -> Iterable[Advice]:
    """What the pinning op reads, takes and makes."""
    own = [b for b in floor.buffers_of(Part.READS, Part.MAKES) if b not in program.gradients]
    logits = _bytes(program, (b for b in own if _is_of_a_loss(program, b)))
    total = _bytes(program, own)
    if logits >= DOMINANT * floor.bytes > 0:
        yield Advice(
            "loss_in_chunks",
            logits,
            f"{format_bytes(logits)} are scores (logits) on their way through the loss: compute the loss in chunks of "
            "rows, each with its own head and cross entropy, or make the batch or the sequences smaller",
        )
    elif total >= DOMINANT * floor.bytes > 0:
        largest = max(own, key=lambda b: program.buffers[b].bytes)
        yield Advice(
            "activation",
            total,
            f"{format_bytes(total)} are what one op reads and makes, {format_bytes(program.buffers[largest].bytes)} of "
            f"it {_made_by(program, largest)}: make the batch, the sequences or the images smaller, or split that line",
        )
    workspace = floor.of(Part.WORKSPACE)
    if workspace >= DOMINANT * floor.bytes > 0:
        yield Advice(
            "workspace",
            workspace,
            f"{format_bytes(workspace)} are taken by one kernel while it runs: another number of threads, memory "
            "format (channels_last) or convolution algorithm (torch.backends) may take less",
        )


def _is_of_a_loss(program: Program, buffer: int) -> bool:
    """Whether a softmax or cross entropy makes or reads it."""
    producer = program.buffers[buffer].producer
    ops = (*program.readers[buffer], *(() if producer is None else (producer,)))
    return any(word in program.ops[o].target for o in ops for word in _LOSSES)


def _gradients(program: Program, floor: Floor) -> Iterable[Advice]:
    """Gradients that exist at the floor's moment or are made there; a published graph does not say what it keeps."""
    if any(op.target == "graph.node" for op in program.ops):
        return
    made = (b for b in floor.buffers_of(Part.MAKES) if b in program.gradients)
    size = floor.of(Part.GRADIENTS) + _bytes(program, made)
    if size >= DOMINANT * floor.bytes > 0:
        yield Advice(
            "gradients",
            size,
            f"{format_bytes(size)} are gradients of parameters, which exist at the end of every step. They do not grow "
            "with the batch, so a larger one costs little here; fewer trainable parameters (freeze some, LoRA), a "
            'smaller dtype, or the optimizer in the backward (step="inside" with optimizer=) lower them',
        )


def _about_kept(floor: Floor) -> Iterable[Advice]:
    """What is held whatever the plan, besides gradients."""
    tangents, outputs = floor.of(Part.TANGENTS), floor.of(Part.OUTPUTS)
    if tangents > SCALAR_BYTES * max(len(floor.buffers_of(Part.TANGENTS)), 1):
        yield Advice(
            "loss_outside",
            tangents,
            f"{format_bytes(tangents)} are the gradient of what the forward returns: compute the loss inside the "
            "model's forward and return it alone, so that the backward starts from a scalar",
        )
    elif outputs >= max(NOTICEABLE * floor.bytes, SCALAR_BYTES + 1):
        yield Advice(
            "outputs",
            outputs,
            f"{format_bytes(outputs)} are returned by the forward and held until the step ends: return the loss alone",
        )
    single, before_change = floor.of(Part.SINGLE_RUN), floor.of(Part.BEFORE_CHANGE)
    if single >= NOTICEABLE * floor.bytes > 0:
        yield Advice(
            "single_run",
            single,
            f"{format_bytes(single)} are results of ops that may not run again: see the ops that run once",
        )
    if before_change >= NOTICEABLE * floor.bytes > 0:
        yield Advice(
            "before_change",
            before_change,
            f"{format_bytes(before_change)} need an input as it was before the step changed it in place: change a copy",
        )


def _resident(floor: Floor, resident_bytes: int, optimizer: str) -> Iterable[Advice]:
    state = (
        f"; offload_optimizer=True (--offload-optimizer) moves the state of {optimizer} out of the step"
        if optimizer
        else ""
    )
    if resident_bytes > floor.bytes:
        yield Advice(
            "resident",
            resident_bytes,
            f"{format_bytes(resident_bytes)} are resident before the step starts, more than all that it has to add: "
            f"parameters in a smaller dtype, or fewer of them, lower this; no plan does{state}",
        )


def _bytes(program: Program, buffers: Iterable[int]) -> int:
    return sum(program.buffers[b].bytes for b in buffers)


def _made_by(program: Program, buffer: int) -> str:
    producer = program.buffers[buffer].producer
    return "a tangent" if producer is None else f"from {program.ops[producer]}"

"""A training step as plain data: ops in captured order that create buffers, and what must be left at the end.

Definitions (the docs use these words and no others):
1. An *op* is one call with at least one output that is not a view. Programs are SSA: an op creates its
   buffers and never changes one.
2. A *buffer* is one storage: the bytes that live and die together, as the device's allocator rounds them.
   Views are no ops; an op reads buffers, each through a chain of views kept as text for people and for the
   program's identity.
3. Parameters and inputs are no buffers: they are resident whatever the plan, ``resident_bytes`` in all.
4. A *tangent* is a buffer without a producer: it appears at the boundary and is held until the step ends.
5. ``ops[:boundary]`` run before the boundary in captured order, the rest after it.
6. A *mutation* is the new value of a parameter or input that the step changes: it is copied back at the boundary.
   One that no op reads is dropped there. One that is read is an ordinary buffer, kept until the forward's last op,
   :data:`COPY_BACK`, has read it too.
7. What user code does *between* the two graphs (a loss outside the model) is a number of bytes at the boundary.
8. An *update* is an op that changes a parameter in place by its gradient (``ebbtide.optimizer``): an ordinary op that
   may not run again, whose output has no bytes. What reads that parameter runs ``until`` then and never after.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar, cast

from ebbtide.units import format_count

__all__ = ["COPY_BACK", "Buffer", "Op", "Program", "analysis"]

COPY_BACK = "ebbtide.copy_back.default"
"""Target of the op that reads new values which other ops read as well; it takes no time and may not run again."""


MOST_SECONDS = 1e100
"""Of one op: a sum over any schedule is finite. Published graphs have FLOPs or units in the place of seconds."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One storage.

    Attributes:
        name: the captured name, for people.
        bytes: what the device's allocator takes for it.
        producer: index of the op that creates it, or ``None`` for a tangent.
        whole: whether the tensor that is created is all of its storage, from its first byte on.
    """

    name: str
    bytes: int
    producer: int | None
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Op:
    """One call that creates buffers.

    Attributes:
        name: the captured name, unique in the program.
        target: what is called, e.g. ``aten.mm.default``.
        inputs: indices of the buffers it reads, each once, ascending. Parameters and inputs are not among them.
        outputs: indices of the buffers it creates, in output order; those that nobody reads are there too.
        views: how each argument is read, as text (definition 2).
        workspace_bytes: what the call takes beyond its outputs while it runs.
        seconds: what one call takes.
        state_bytes: bytes of generator state that a replay needs; positive exactly for random ops.
        rerunnable: whether a second run is allowed and gives the same bits (false for effectful ops,
            collectives and kernels that are not reproducible).
        reads_mutated: whether it reads a parameter or input that the boundary's copy-back changes;
            such an op cannot run after the boundary.
        repeat: what a rerun calls in place of ``target``, if not the same.
        once: how many outputs, the last ones, only the first run makes; each is a mutation or an output.
        source: ``file:line`` in the user's code, if known.
        module: the module path that issued it, if known.
        signature: key of its cost; ops with one signature cost the same.
        until: indices of later ops, updates of what it reads, after which it may not run (definition 8).
    """

    name: str
    target: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    views: tuple[str, ...] = ()
    workspace_bytes: int = 0
    seconds: float = 0.0
    state_bytes: int = 0
    rerunnable: bool = True
    reads_mutated: bool = False
    repeat: str = ""
    once: int = 0
    source: str = ""
    module: str = ""
    signature: str = ""
    until: tuple[int, ...] = ()

    @property
    def random(self) -> bool:
        """Whether it draws from a generator, so that a repeat must replay the state of its first run."""
        return self.state_bytes > 0

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.name} ({self.target}){where}"


@dataclass(frozen=True)
class Program:
    """One captured training step. Immutable; analyses are cached on it and never rewrite it.

    Attributes:
        name: the case it was captured from.
        ops: in captured order, which is a topological order.
        buffers: all storages that the ops create, and the tangents.
        boundary: definition 5.
        forward_outputs: buffers that must exist at the boundary and are held until the step ends.
        gradients: buffers that must exist at the end.
        mutations: buffers that no op reads and that must exist at the boundary, where they go (definition 6).
        between_bytes: the peak of user code between the two graphs, above the level that the forward left;
            the tangents are in it. What is less than their bytes counts as their bytes.
        held_bytes: what user code keeps from the boundary to the step's end besides outputs and tangents; negative if
            it gives back more of what was resident than it keeps.
        resident_bytes: definition 3.
        context: what the program depends on besides its ops (device, threads, torch build).

    Raises:
        ValueError: if it is not a program (an index out of range, an op that reads what does not exist yet).
    """

    name: str
    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    boundary: int
    forward_outputs: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    mutations: tuple[int, ...] = ()
    between_bytes: int = 0
    held_bytes: int = 0
    resident_bytes: int = 0
    context: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self._validate()

    def _validate(self) -> None:
        if not 0 <= self.boundary <= len(self.ops):
            raise ValueError(f"boundary {self.boundary} is not in 0..{len(self.ops)}")
        produced = {b for b, buffer in enumerate(self.buffers) if buffer.producer is None}
        tangents = frozenset(produced)
        for buffer in self.buffers:
            if buffer.bytes < 0:
                raise ValueError(f"buffer {buffer.name} has {buffer.bytes} bytes")
        for index, op in enumerate(self.ops):
            if not op.outputs:
                raise ValueError(f"op {index} {op.name} creates no buffer")
            if any(not index < u < len(self.ops) or self.ops[u].rerunnable for u in op.until):
                raise ValueError(f"op {index} {op.name} is to run until an op that does not come later, once")
            if op.workspace_bytes < 0 or op.state_bytes < 0 or not 0 <= op.seconds <= MOST_SECONDS:
                raise ValueError(f"op {index} {op.name} has a cost that is negative, or too large to be added up")
            for b in op.inputs:
                if b not in produced:
                    raise ValueError(f"op {index} {op.name} reads buffer {b} before it exists")
                if index < self.boundary and b in tangents:
                    raise ValueError(f"op {index} {op.name} reads a tangent before the boundary")
            for b in op.outputs:
                if not 0 <= b < len(self.buffers) or self.buffers[b].producer != index or b in produced:
                    raise ValueError(f"op {index} {op.name} does not create buffer {b} once")
                produced.add(b)
        if len(produced) != len(self.buffers):
            raise ValueError("a buffer has a producer that does not create it")
        for index, op in enumerate(self.ops):
            for b in op.outputs[len(op.outputs) - op.once :]:
                if b not in self.pinned and b not in self.mutations:
                    raise ValueError(f"output {b} of op {index} is made once and not kept")
        for b in self.mutations:
            if b in self.pinned or self.readers[b]:
                raise ValueError(f"mutation {b} is read or an output")
        for b in (*self.forward_outputs, *self.mutations):
            if b not in produced or (self.buffers[b].producer or 0) >= self.boundary:
                raise ValueError(f"forward output {b} is not created before the boundary")
        for b in self.gradients:
            if b not in produced:
                raise ValueError(f"gradient {b} is not created")

    # -- analyses -------------------------------------------------------------------------------------------

    @cached_property
    def known(self) -> dict[object, object]:
        """What functions marked :func:`analysis` have said of this program."""
        return {}

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per buffer, the indices of the ops that read it, ascending."""
        found: list[list[int]] = [[] for _ in self.buffers]
        for index, op in enumerate(self.ops):
            for b in op.inputs:
                found[b].append(index)
        return tuple(tuple(each) for each in found)

    @cached_property
    def tangents(self) -> tuple[int, ...]:
        """Indices of the tangents, definition 4."""
        return tuple(b for b, buffer in enumerate(self.buffers) if buffer.producer is None)

    @cached_property
    def pinned(self) -> frozenset[int]:
        """Buffers that stay once they exist: forward outputs, gradients and tangents."""
        return frozenset(self.forward_outputs) | frozenset(self.gradients) | frozenset(self.tangents)

    @cached_property
    def movable(self) -> frozenset[int]:
        """Buffers that may leave for another tier: whole, not empty, made by an op, neither pinned nor mutations."""
        stays = self.pinned.union(self.mutations)
        return frozenset(b for b, buffer in enumerate(self.buffers) if buffer.whole and buffer.bytes and b not in stays)

    @cached_property
    def copied_back(self) -> frozenset[int]:
        """New values of parameters and inputs: mutations, and what :data:`COPY_BACK` reads (definition 6)."""
        read = (b for op in self.ops if op.target == COPY_BACK for b in op.inputs)
        return frozenset((*read, *self.mutations))

    @cached_property
    def returned_bytes(self) -> int:
        """Bytes of what the forward returns."""
        return sum(self.buffers[b].bytes for b in set(self.forward_outputs))

    @cached_property
    def late_bytes(self) -> int:
        """Bytes that appear at the boundary and stay until the step ends: tangents and what user code holds."""
        return sum(self.buffers[b].bytes for b in self.tangents) + self.held_bytes

    @cached_property
    def between_excess_bytes(self) -> int:
        """By how much user code between the two graphs exceeds, at its peak, what it leaves behind."""
        return max(self.between_bytes - self.late_bytes, 0)

    def made_by_rerun(self, op: int) -> tuple[int, ...]:
        """Outputs that a rerun of ``op`` makes."""
        outputs = self.ops[op].outputs
        return outputs[: len(outputs) - self.ops[op].once]

    @cached_property
    def after_boundary(self) -> tuple[bool, ...]:
        """Per op, whether it depends on a tangent, so that it cannot run before the boundary."""
        late = [buffer.producer is None for buffer in self.buffers]
        flags: list[bool] = []
        for op in self.ops:
            flag = any(late[b] for b in op.inputs)
            flags.append(flag)
            for b in op.outputs:
                late[b] = flag
        return tuple(flags)

    @cached_property
    def has_updates(self) -> bool:
        """Whether some of its ops are updates of what others read (definition 8)."""
        return any(op.until for op in self.ops)

    def before_updates(self, order: Sequence[int | None]) -> Sequence[int | None]:
        """``order`` without runs that would read what an update has changed by then.

        Where first runs are in captured order such a run serves nobody: an update stands behind all that may need what
        it changes, made again or not (``ebbtide.optimizer.in_step.updates``). Whoever repeats layers repeats some.
        """
        if not self.has_updates:
            return order
        ran: set[int] = set()
        kept: list[int | None] = []
        for op in order:
            if op is not None:
                if op in ran and not ran.isdisjoint(self.ops[op].until):
                    continue
                ran.add(op)
            kept.append(op)
        return kept

    @cached_property
    def seconds(self) -> float:
        """Seconds of all ops once: the unplanned step."""
        return sum(op.seconds for op in self.ops)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of what is computed: ops, reads, sizes and outputs, without costs, names of places or context."""
        digest = hashlib.sha256()
        for op in self.ops:
            made = (op.target, op.repeat, op.once, op.inputs, op.outputs, op.views)
            digest.update(repr((made, op.state_bytes, op.rerunnable, op.reads_mutated)).encode())
            if op.until:
                digest.update(repr(op.until).encode())
        for buffer in self.buffers:
            digest.update(repr((buffer.bytes, buffer.producer)).encode())
        digest.update(repr((self.boundary, self.forward_outputs, self.gradients, self.mutations)).encode())
        return digest.hexdigest()[:32]

    # -- derived programs and forms -------------------------------------------------------------------------

    def with_costs(self, seconds: Iterable[float], workspace_bytes: Iterable[int]) -> Program:
        """This program with other costs per op."""
        ops = tuple(
            op if (op.seconds, op.workspace_bytes) == (s, w) else replace(op, seconds=float(s), workspace_bytes=int(w))
            for op, s, w in zip(self.ops, seconds, workspace_bytes, strict=True)
        )
        return replace(self, ops=ops)

    def to_json(self) -> dict[str, Any]:
        """Plain data for :func:`json.dumps`; :meth:`from_json` reads it back."""
        return {
            "name": self.name,
            "boundary": self.boundary,
            "forward_outputs": list(self.forward_outputs),
            "gradients": list(self.gradients),
            "mutations": list(self.mutations),
            "between_bytes": self.between_bytes,
            "held_bytes": self.held_bytes,
            "resident_bytes": self.resident_bytes,
            "context": dict(self.context),
            "buffers": [[b.name, b.bytes, b.producer, *([] if b.whole else [False])] for b in self.buffers],
            # Most programs have no updates, and are written as before there were any.
            "ops": [[getattr(op, name) for name in _OP_FIELDS[: None if op.until else -1]] for op in self.ops],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Program:
        """The program that :meth:`to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: if ``data`` is no program.
        """
        ops: list[Op] = []
        for row in data["ops"]:
            values = dict(zip(_OP_FIELDS[: None if len(row) == len(_OP_FIELDS) else -1], row, strict=True))
            for key in ("inputs", "outputs", "views", "until"):
                values[key] = tuple(values.get(key, ()))
            ops.append(Op(**values))
        return Program(
            name=str(data["name"]),
            ops=tuple(ops),
            buffers=tuple(Buffer(str(n), int(size), p, all(whole)) for n, size, p, *whole in data["buffers"]),
            boundary=int(data["boundary"]),
            forward_outputs=tuple(data["forward_outputs"]),
            gradients=tuple(data["gradients"]),
            mutations=tuple(data["mutations"]),
            between_bytes=int(data["between_bytes"]),
            held_bytes=int(data["held_bytes"]),
            resident_bytes=int(data["resident_bytes"]),
            context={str(k): str(v) for k, v in data["context"].items()},
        )

    def __str__(self) -> str:
        size = f"{format_count(len(self.ops), 'op')}, {format_count(len(self.buffers), 'buffer')}"
        lines = [f"program {self.name}: {size}, boundary {self.boundary}"]
        for index, op in enumerate(self.ops):
            if index == self.boundary:
                lines.append("  -- boundary --")
            outs = ", ".join(f"b{b}[{self.buffers[b].bytes}]" for b in op.outputs)
            lines.append(f"  {index}: {outs} = {op.target}({', '.join(f'b{b}' for b in op.inputs)})")
        return "\n".join(lines)

    def json_text(self) -> str:
        """:meth:`to_json` as compact text."""
        return json.dumps(self.to_json(), separators=(",", ":"))


_OP_FIELDS = tuple(Op.__dataclass_fields__)

Said = TypeVar("Said")


def analysis(function: Callable[[Program], Said]) -> Callable[[Program], Said]:
    """Mark a pure function whose result nobody changes: it is computed once per program and kept on it."""

    @wraps(function)
    def once(program: Program) -> Said:
        if once not in program.known:
            program.known[once] = function(program)
        return cast(Said, program.known[once])

    return once

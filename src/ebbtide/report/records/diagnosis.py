"""What a captured step holds that matters for its memory: the record behind ``ebbtide doctor``.

Definitions:
1. Ops are told apart by *place*: their target, the module that issued them with the numbers in its path as ``*``
   (like blocks count as one), their source line, and the side of the boundary. Buffers belong to their op's place.
2. A buffer's *life* is that of the unplanned step: from its op to its last reader, to the last op before the
   boundary if it is a mutation, or to the step's end if it stays.
3. An op is *opaque* if its target is no ATen or prims op: a custom op or a higher-order one. Nobody looks inside;
   it is planned as a whole.

Everything is found in the program; nothing runs. Bytes are above the step's start unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from ebbtide.errors import CaptureError
from ebbtide.planners.bounds.floor_parts import floor_parts
from ebbtide.report.records.advice import SCALAR_BYTES, Advice, advise
from ebbtide.report.records.profile import Kind, LayerType, kinds_at, layer_types_at
from ebbtide.report.records.rewriting import Rewriting
from ebbtide.step.occupancy import Moment, moment_at
from ebbtide.step.plan import PlanRecord
from ebbtide.step.program import COPY_BACK, Op, Program
from ebbtide.step.provenance import LossPlace, Provenance
from ebbtide.step.resident_in_words import parts_of
from ebbtide.step.unplanned import unplanned_schedule

__all__ = ["Break", "BufferGroup", "Findings", "FloorPin", "OpGroup", "Peak", "Place", "break_of", "find", "place_of"]

_NOT_OPAQUE = ("aten", "prims", "graph")  # "graph": a node of a published graph file
LITTLE = 0.1
"""Of the unplanned peak: planning that takes off less is hardly worth its time."""
_COLLECTIVES = ("_c10d_functional", "c10d", "c10d_functional")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a buffer is made (definition 1).

    Attributes:
        op: the target; the op's own name in a published graph; ``tangent`` where there is no op.
        module: path with ``*`` for numbers, or empty.
        source: ``file:line``, or empty.
        backward: whether the op runs after the boundary.
    """

    op: str
    module: str
    source: str
    backward: bool


@dataclass(frozen=True, slots=True)
class BufferGroup:
    """Buffers of one place.

    Attributes:
        place: definition 1.
        live_bytes: the most of them that is live at one time in the unplanned step.
        bytes: of all of them.
        count: how many.
        first_op: index of the first op that makes one; the boundary for tangents.
        last_op: index of the last op that needs one, the number of ops for the step's end (definition 2).
        pinned: how many stay to the step's end under any plan.
    """

    place: Place
    live_bytes: int
    bytes: int
    count: int
    first_op: int
    last_op: int
    pinned: int


@dataclass(frozen=True, slots=True)
class OpGroup:
    """Ops of one target that share a trait.

    Attributes:
        target: what is called.
        count: how many ops.
        bytes: of their results; only of those that the boundary copies, for mutations; of the generator's state
            that replays need, for random ops.
        note: why it may not run again, or what a rerun calls; else empty.
        places: distinct ``in MODULE at FILE:LINE`` with ``*`` for numbers, in captured order.
    """

    target: str
    count: int
    bytes: int
    note: str
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of the unplanned peak.

    Attributes:
        above_bytes: the peak.
        op: index of the op that runs, ``None`` for user code at the boundary.
        at: that op in words.
        groups: places with the most bytes that are live, largest first.
        rest_bytes: of all other places.
        other_bytes: workspace and what user code takes. Groups, rest and other add up to the peak.
    """

    above_bytes: int
    op: int | None
    at: str
    groups: tuple[BufferGroup, ...]
    rest_bytes: int
    other_bytes: int


@dataclass(frozen=True, slots=True)
class FloorPin:
    """What pins the floor.

    Attributes:
        above_bytes: the floor.
        op: index of the op, the number of ops for the step's end.
        at: the moment in words.
        parts: what it is made of, in words with bytes; they add up.
    """

    above_bytes: int
    op: int
    at: str
    parts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Break:
    """Why a step is not one program.

    Attributes:
        reason: what stands in the way.
        source: ``file:line`` in the user's code, if known.
        remedy: what to do.
    """

    reason: str
    source: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything found in one captured step. The attributes are the keys of :meth:`to_json`.

    Attributes:
        case: name of what was captured.
        ops: number of ops.
        forward_ops: how many of them run before the boundary.
        buffers: number of buffers.
        resident_bytes: bytes resident at the step's start.
        resident_parts: what these are made of, bytes by kind; empty where nothing is known of them.
        reserve_bytes: bytes that a budget has to leave for the proof of the first step.
        baseline_peak_bytes: peak of the unplanned step, resident part included.
        floor_bytes: no plan with PyTorch's op order and boundary gets below this; resident part and reserve
            included.
        smallest_bytes: the least budget for which a plan was found.
        random: ops that draw random numbers.
        single_run: ops that may not run again.
        opaque: definition 3.
        rerun_forms: ops that a rerun calls in another form.
        reads_mutated: ops that read an input before the boundary changes it, so that they run before it only.
        mutations: ops whose results are copied into parameters and inputs at the boundary.
        mutation_bytes: of those results.
        tangent_bytes: of the gradients that the backward starts from.
        loss_outside: whether these are more than scalars.
        largest: places with the most bytes at one time, over the whole step.
        peak: of the unplanned step.
        kinds: the unplanned peak by kind of what is live, resident part included; they add up to it.
        layers: the same above the step's start, and seconds, by type of layer; empty for a published graph.
        floor: what pins it.
        advice: what would lower it.
        provenance: where costs are from.
        budget_bytes: the budget that was asked about, bytes of peak; ``None`` if none was.
        overhead: of the plan that was found within it; ``None`` if there is none, or no budget.
        rewrites: what takes the place of parts of the step where a budget asks for it, and what is left.
        rewritten: what that plan rewrites.
    """

    case: str
    ops: int
    forward_ops: int
    buffers: int
    resident_bytes: int
    resident_parts: Mapping[str, int]
    reserve_bytes: int
    baseline_peak_bytes: int
    floor_bytes: int
    smallest_bytes: int
    random: tuple[OpGroup, ...]
    single_run: tuple[OpGroup, ...]
    opaque: tuple[OpGroup, ...]
    rerun_forms: tuple[OpGroup, ...]
    reads_mutated: tuple[OpGroup, ...]
    mutations: tuple[OpGroup, ...]
    mutation_bytes: int
    tangent_bytes: int
    loss_outside: bool
    largest: tuple[BufferGroup, ...]
    peak: Peak
    kinds: tuple[Kind, ...]
    layers: tuple[LayerType, ...]
    floor: FloorPin
    advice: tuple[Advice, ...]
    provenance: Provenance
    budget_bytes: int | None = None
    overhead: float | None = None
    rewrites: tuple[Rewriting, ...] = ()
    rewritten: tuple[str, ...] = ()

    @property
    def rewritten_floors(self) -> list[int]:
        """Bytes below which no budget for a rewritten step is, by rewrite that a plan may use."""
        return [each.floor_bytes for each in self.rewrites if each.floor_bytes is not None and not each.why_not]

    @property
    def gain_bytes(self) -> int:
        """What planning can take off the unplanned peak at most: to a plan that was found, or to a rewrite's floor."""
        return max(self.baseline_peak_bytes - min([self.smallest_bytes, *self.rewritten_floors]), 0)

    @property
    def is_small(self) -> bool:
        """Whether what is fixed decides the step: planning takes next to nothing off its peak."""
        return self.gain_bytes < LITTLE * self.baseline_peak_bytes

    def advice_beside(self, rewrites: tuple[Rewriting, ...]) -> Iterable[Advice]:
        """The advice less what ``rewrites`` do of themselves."""
        lower = any(each.floor_bytes is not None and not each.why_not for each in rewrites)
        return (each for each in self.advice if not (lower and each.rule == "loss_in_chunks"))

    def to_json(self) -> dict[str, Any]:
        """Plain data, keys as the attributes."""
        return {**asdict(self), "provenance": self.provenance.as_dict()}


def find(
    plan: PlanRecord,
    top: int = 10,
    *,
    resident: Mapping[str, int] | None = None,
    types: Mapping[str, str] | None = None,
) -> Findings:
    """Everything that is found in the program of ``plan``.

    Args:
        plan: any plan of the step; its schedule does not matter.
        top: how many places to list by bytes.
        resident: what the resident part is made of, bytes by kind; ``None`` if that is not known.
        types: the class of each module by its path; ``None`` if that is not known.
    """
    program = plan.program
    peak = moment_at(program, unplanned_schedule(program), plan.baseline.peak_action)
    floor = floor_parts(program)
    tangents = [program.buffers[b].bytes for b in program.tangents]
    mutations = program.copied_back
    calls = [op for op in program.ops if op.target != COPY_BACK]
    made = partial(_bytes, program)
    return Findings(
        case=plan.case,
        ops=len(program.ops),
        forward_ops=program.boundary,
        buffers=len(program.buffers),
        resident_bytes=plan.resident_bytes,
        resident_parts={} if resident is None else parts_of(resident, plan.resident_bytes),
        reserve_bytes=plan.reserve_bytes,
        baseline_peak_bytes=plan.baseline_peak_bytes,
        floor_bytes=plan.floor_bytes,
        smallest_bytes=plan.smallest_bytes,
        random=_ops((o for o in program.ops if o.random), lambda op: op.state_bytes),
        single_run=_ops((o for o in calls if not o.rerunnable), made, _why_once),
        opaque=_ops((o for o in calls if _namespace(o) not in _NOT_OPAQUE), made),
        rerun_forms=_ops((o for o in program.ops if o.repeat), made, lambda op: op.repeat),
        reads_mutated=_ops((o for o in program.ops if o.reads_mutated), made),
        mutations=_ops((o for o in program.ops if mutations.intersection(o.outputs)), partial(made, among=mutations)),
        mutation_bytes=sum(program.buffers[b].bytes for b in mutations),
        tangent_bytes=sum(tangents),
        loss_outside=plan.provenance.loss is LossPlace.OUTSIDE or max(tangents, default=0) > SCALAR_BYTES,
        largest=_groups(program, range(len(program.buffers)))[:top],
        peak=_peak(program, peak, top),
        kinds=kinds_at(program, peak, resident or {}, plan.resident_bytes),
        layers=layer_types_at(program, peak, types or {}),
        floor=FloorPin(
            above_bytes=floor.bytes,
            op=floor.op,
            at=_at(program, floor.op, floor.moment),
            parts={each.part.value: each.bytes for each in floor.parts},
        ),
        advice=advise(
            program, floor, plan.resident_bytes, "" if plan.provenance.offloaded else plan.provenance.optimizer
        ),
        provenance=plan.provenance,
    )


def break_of(error: CaptureError) -> Break:
    """What a capture error says, as a finding."""
    return Break(error.reason, error.source, error.remedy)


def _namespace(op: Op) -> str:
    return op.target.partition(".")[0]


def place_of(program: Program, buffer: int) -> Place:
    """Where ``buffer`` is made (definition 1)."""
    producer = program.buffers[buffer].producer
    if producer is None:
        return Place("tangent", "", "", True)
    op = program.ops[producer]
    name = op.name if _namespace(op) == "graph" else op.target
    return Place(name, _like(op.module), op.source, producer >= program.boundary)


def _like(module: str) -> str:
    """A module path with ``*`` for numbers."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _groups(program: Program, buffers: Iterable[int]) -> tuple[BufferGroup, ...]:
    """``buffers`` by place, those with the most bytes at one time first."""
    found: dict[Place, list[int]] = {}
    for b in buffers:
        if program.buffers[b].bytes:
            found.setdefault(place_of(program, b), []).append(b)
    groups: list[BufferGroup] = []
    for place, members in found.items():
        lives = [(*_life(program, b), program.buffers[b].bytes) for b in members]
        groups.append(
            BufferGroup(
                place=place,
                live_bytes=_most_at_once(lives),
                bytes=sum(size for _, _, size in lives),
                count=len(members),
                first_op=min(first for first, _, _ in lives),
                last_op=max(last for _, last, _ in lives),
                pinned=sum(b in program.pinned for b in members),
            )
        )
    return tuple(sorted(groups, key=lambda group: (-group.live_bytes, -group.bytes, group.place)))


def _most_at_once(lives: Iterable[tuple[int, int, int]]) -> int:
    """The largest sum of sizes over one op, of lives given as first op, last op, size."""
    change: dict[int, int] = {}
    for first, last, size in lives:
        change[first] = change.get(first, 0) + size
        change[last + 1] = change.get(last + 1, 0) - size
    return max(accumulate(change[op] for op in sorted(change)))


def _life(program: Program, buffer: int) -> tuple[int, int]:
    """The first and last op of a buffer's life."""
    producer = program.buffers[buffer].producer
    first = program.boundary if producer is None else producer
    last = max(program.readers[buffer], default=first)
    if buffer in program.pinned:
        last = len(program.ops)
    elif buffer in program.mutations:
        last = program.boundary - 1
    return first, last


def _bytes(program: Program, op: Op, among: Container[int] | None = None) -> int:
    """Bytes of what ``op`` makes, or of those results that are ``among`` these."""
    return sum(program.buffers[b].bytes for b in op.outputs if among is None or b in among)


def _ops(ops: Iterable[Op], size: Callable[[Op], int], note: Callable[[Op], str] = lambda _: "") -> tuple[OpGroup, ...]:
    """``ops`` by target, in captured order; ``size`` gives the bytes of one, ``note`` what to say of a target."""
    found: dict[str, list[Op]] = {}
    for op in ops:
        found.setdefault(op.target, []).append(op)
    return tuple(
        OpGroup(
            target=target,
            count=len(members),
            bytes=sum(map(size, members)),
            note=note(members[0]),
            places=tuple(dict.fromkeys(filter(None, (_where(op) for op in members)))),
        )
        for target, members in found.items()
    )


def _why_once(op: Op) -> str:
    """Why ``op`` may not run again."""
    if _namespace(op) in _COLLECTIVES:
        return "it is a collective, which every rank has to call"
    if _namespace(op) == "aten" and not op.target.split(".")[1].endswith("_"):
        return (
            "it sums with atomics, so that the last bits may differ; torch.use_deterministic_algorithms(True) makes "
            "it repeatable"
        )
    if _namespace(op) not in _NOT_OPAQUE and not op.target.split(".")[0].startswith("ebbtide"):
        return (
            "nobody can look into it: it may have an effect, draw random numbers or count; ebbtide.repeatable(op) says "
            "that it gives the same bits again"
        )
    return "it has an effect besides its results"


def _where(op: Op) -> str:
    module = f"in {_like(op.module)}" if op.module else ""
    source = f"at {op.source}" if op.source else ""
    return " ".join(filter(None, (module, source)))


def _at(program: Program, index: int | None, moment: str) -> str:
    """A moment in words."""
    if moment == "end":
        return "the end of the step"
    if moment == "boundary" or index is None:
        return "user code between forward and backward"
    op = program.ops[index]
    return f"{op}{' in ' + op.module if op.module else ''}"


def _peak(program: Program, moment: Moment, top: int) -> Peak:
    groups = _groups(program, moment.buffers)
    total = moment.bytes(program)
    return Peak(
        above_bytes=total,
        op=moment.op,
        at=_at(program, moment.op, "op"),
        groups=groups[:top],
        rest_bytes=sum(group.bytes for group in groups[top:]),
        other_bytes=total - sum(group.bytes for group in groups),
    )

"""Repeated blocks of a program (layers, time steps): found by hash, taken out or put in, and plans carried across.

Definitions:
1. The *token* of an op is what it calls, what it makes and how much it reads, without which buffers and without
   costs. A *region* is a longest stretch of ops in which every token is that of the op one *period* later: block
   ``j`` of a region is its ops from ``j`` periods on. Forward and backward have regions of their own.
2. Regions are *linked* if the reads of one go to the other block by block, in the same or in reverse order, as
   those of a backward go to its forward. Blocks of linked regions have one *coordinate*: the block of the largest
   region that they belong to.
3. A read is *relative* (its block is a constant number of coordinates from its reader's) or *absolute* (the same
   block for all readers, or no block).
4. :func:`with_blocks` gives the program with another number of blocks: those in the middle are left out, or the one
   there is put in again, in all linked regions alike. Where every block is alike but for the first and last few,
   as in transformers, that is exactly the program that capturing such a model gives.
5. A plan is *carried* from one number of blocks to another by giving each block the reruns of one that stands for it,
   each before the stage as many coordinates away. What is carried need not fit: it is a start point.

Planning identical blocks once is due to Rockmate (Zhao et al., 2023) and the feasibility of it here to a study of
tiled GPT programs; the canonical form by tokens and relative reads is ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ebbtide.step.arrays import Ints, flat
from ebbtide.step.program import Buffer, Op, Program

__all__ = ["IsomorphicOps", "Repeats", "Tiled", "carry", "find_repeats", "isomorphic_ops", "with_blocks"]

LEAST_BLOCKS = 4
CANDIDATES = 24  # periods that are tried, those at which most tokens come again
NEARLY = 0.95  # of the longest stretch: a smaller period is preferred to its multiples
MOST_REGIONS = 12
LEAST_SHARE = 0.02  # of all ops in a region
AGREEING = 0.6  # of the reads between two regions that link them


@dataclass(frozen=True, slots=True)
class Region:
    """Ops ``first .. first + period * blocks``.

    Attributes:
        first: its first op.
        period: ops per block.
        blocks: their number.
        sign: 1 if blocks are in order of the coordinate, -1 if in reverse; 0 if not linked.
        shift: coordinate of block 0.
    """

    first: int
    period: int
    blocks: int
    sign: int = 0
    shift: int = 0

    @property
    def end(self) -> int:
        """One past the last op."""
        return self.first + self.period * self.blocks

    def coordinate(self, block: int) -> int:
        """The coordinate of a block (definition 2)."""
        return self.sign * block + self.shift


@dataclass(frozen=True)
class Repeats:
    """The linked regions of a program.

    Attributes:
        program: in which they are.
        regions: ascending; linked ones only.
        blocks: of the largest region, which has sign 1 and shift 0.
    """

    program: Program
    regions: tuple[Region, ...]
    blocks: int

    def place(self, op: int) -> tuple[int, int, int] | None:
        """Number of its region, block and position in the block; ``None`` outside."""
        for number, region in enumerate(self.regions):
            if region.first <= op < region.end:
                return number, *divmod(op - region.first, region.period)
        return None


@dataclass(frozen=True)
class Tiled:
    """A program with another number of blocks.

    Attributes:
        program: of that number.
        repeats: its regions.
        origin: per op, the op of the original program that it stands for.
    """

    program: Program
    repeats: Repeats
    origin: tuple[int, ...]


def find_repeats(program: Program) -> Repeats | None:
    """The linked regions of at least :data:`LEAST_BLOCKS` blocks; ``None`` if there are none."""
    tokens = _tokens(program)
    n, edge = len(program.ops), program.boundary
    found = sorted([*_regions(tokens, 0, edge, n), *_regions(tokens, edge, n, n)], key=lambda r: r.first)
    if not found:
        return None
    main = max(range(len(found)), key=lambda i: (found[i].end <= edge, found[i].blocks * found[i].period))
    linked = _link(program, found, main)
    lowest = min(min(r.coordinate(0), r.coordinate(r.blocks - 1)) for r in linked)
    linked = [replace(r, shift=r.shift - lowest) for r in linked]
    blocks = 1 + max(max(r.coordinate(0), r.coordinate(r.blocks - 1)) for r in linked)
    return Repeats(program, tuple(linked), blocks)


def _tokens(program: Program) -> Ints:
    """A number for the token of each op (definition 1)."""
    form = flat(program)
    first, made = form.makes.first.tolist(), form.makes.items
    sizes, kept = form.bytes[made].tolist(), form.pinned[made].tolist()
    numbers: dict[object, int] = {}
    found: list[int] = []
    for op, begin, end in zip(program.ops, first, first[1:], strict=False):
        makes = (op.target, tuple(sizes[begin:end]), tuple(kept[begin:end]), op.workspace_bytes)
        key = (makes, len(op.inputs), op.state_bytes, op.rerunnable, op.reads_mutated, op.once)
        found.append(numbers.setdefault(key, len(numbers)))
    return np.array(found, np.int64)


def _regions(tokens: Ints, first: int, end: int, ops: int) -> Iterator[Region]:
    """Regions between two ops: the longest, then those to its left and right."""
    open_spans = [(first, end)]
    count = 0
    while open_spans and count < MOST_REGIONS:
        low, high = open_spans.pop()
        best = _longest(tokens[low:high])
        if best is None or best[1] * best[2] < LEAST_SHARE * ops:
            continue
        start, period, blocks = best
        region = Region(low + start, period, blocks)
        count += 1
        yield region
        open_spans += [(low, region.first), (region.end, high)]


def _longest(tokens: Ints) -> tuple[int, int, int] | None:
    """First op, period and number of blocks of the longest region in ``tokens``."""
    order = np.argsort(tokens, kind="stable")
    same = tokens[order[1:]] == tokens[order[:-1]]
    distances: Counter[int] = Counter(int(each) for each in (order[1:] - order[:-1])[same])
    # Tokens that come several times in a block have parts of the period as distances: their sums are tried as well.
    often = [distance for distance, _ in distances.most_common(CANDIDATES)]
    found: list[tuple[int, int, int, int]] = []
    for period in sorted({*often, *(a + b for a in often[:6] for b in often[:6])}):
        if 0 < period and LEAST_BLOCKS * period <= len(tokens):
            start, length = _stretch(tokens[:-period] == tokens[period:])
            blocks = (length + period) // period
            if blocks >= LEAST_BLOCKS:
                found.append((blocks * period, start, period, blocks))
    if not found:
        return None
    enough = NEARLY * max(found)[0]
    _, start, period, blocks = min((f for f in found if f[0] >= enough), key=lambda f: f[2])
    return start, period, blocks


def _stretch(equal: NDArray[np.bool_]) -> tuple[int, int]:
    """Start and length of the longest run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.astype(np.int8), [0]])))
    if not len(edges):
        return 0, 0
    starts, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])


def _link(program: Program, regions: list[Region], main: int) -> list[Region]:
    """The regions that are linked with ``main``, with sign and shift."""
    form, count = flat(program), len(regions)
    where = np.full(len(program.ops) + 1, -1, np.int64)  # one more, for tangents
    block = np.zeros(len(program.ops) + 1, np.int64)
    for number, region in enumerate(regions):
        where[region.first : region.end] = number
        block[region.first : region.end] = np.arange(region.period * region.blocks) // region.period
    reader, producer = form.reads.owner, form.producer[form.reads.items]
    across = (where[reader] >= 0) & (where[producer] >= 0) & (where[reader] != where[producer])
    reader, producer = reader[across], producer[across]
    between = where[reader] * count + where[producer]
    reads: dict[tuple[int, int], tuple[Ints, Ints]] = {}
    for each in dict.fromkeys(between.tolist()):
        here = between == each
        reads[divmod(each, count)] = block[reader[here]], block[producer[here]]
    linked = {main: replace(regions[main], sign=1, shift=0)}
    fresh = [main]
    while fresh:
        known = fresh.pop()
        for (mine, theirs), pairs in reads.items():
            if known not in (mine, theirs) or (mine in linked and theirs in linked):
                continue
            other = theirs if known == mine else mine
            relation = _relation(*(pairs if known == mine else pairs[::-1]))
            if relation is not None:
                sign, shift = relation  # block of known = sign * block of other + shift
                here = linked[known]
                linked[other] = replace(regions[other], sign=here.sign * sign, shift=here.sign * shift + here.shift)
                fresh.append(other)
    return [linked[number] for number in sorted(linked)]


def _relation(ours: Ints, theirs: Ints) -> tuple[int, int] | None:
    """``(sign, shift)`` with ``ours = sign * theirs + shift`` for most pairs of blocks."""
    if len(np.unique(ours)) < LEAST_BLOCKS - 1:
        return None
    for sign in (-1, 1):
        shifts, counts = np.unique(ours - sign * theirs, return_counts=True)
        if counts.max() >= AGREEING * len(ours):
            return sign, int(shifts[counts.argmax()])
    return None


def with_blocks(repeats: Repeats, blocks: int) -> Tiled:
    """The program with ``blocks`` blocks (definition 4).

    Args:
        repeats: of the program.
        blocks: at least :data:`LEAST_BLOCKS`.
    """
    return _Tiling(repeats, blocks).tiled()


class _Tiling:
    """Builds a program from another one's blocks."""

    def __init__(self, repeats: Repeats, blocks: int) -> None:
        self.repeats, self.program = repeats, repeats.program
        self.added = blocks - repeats.blocks
        self.seam = repeats.blocks // 2 + min(self.added, 0) // 2  # coordinates from here on move by ``added``
        self.number: dict[tuple[int, int], int] = {}  # (original op, coordinate) -> new op; coordinate -1 outside
        self.origin: list[int] = []
        self.places: list[int] = []  # per new op its coordinate
        self.regions: list[Region] = []

    def tiled(self) -> Tiled:
        """The program with its blocks."""
        op = 0
        for region in self.repeats.regions:
            self._emit(range(op, region.first), -1)
            first, count = len(self.origin), region.blocks + self.added
            shift = region.shift if region.sign > 0 else region.shift + self.added
            moved = replace(region, first=first, blocks=count, shift=shift)
            for block in range(count):
                coordinate = moved.coordinate(block)
                template = region.sign * (self._original(coordinate) - region.shift)
                start = region.first + template * region.period
                self._emit(range(start, start + region.period), coordinate)
            self.regions.append(moved)
            op = region.end
        self._emit(range(op, len(self.program.ops)), -1)
        program = self._program()
        return Tiled(
            program, Repeats(program, tuple(self.regions), self.repeats.blocks + self.added), tuple(self.origin)
        )

    def _emit(self, ops: Iterable[int], coordinate: int) -> None:
        for op in ops:
            self.number[op, coordinate] = len(self.origin)
            self.origin.append(op)
            self.places.append(coordinate)

    def _original(self, coordinate: int) -> int:
        """The original coordinate that a new one stands for."""
        if coordinate < self.seam:
            return coordinate
        return max(coordinate - self.added, self.seam)

    def _moved(self, coordinate: int) -> int | None:
        """The new coordinate of an original one; ``None`` if it is left out."""
        if coordinate < self.seam:
            return coordinate
        return coordinate + self.added if coordinate + self.added >= self.seam else None

    def _read(self, reader: int, coordinate: int, b: int) -> tuple[int, int] | None:
        """New op and output position that make what ``reader`` at a coordinate reads as ``b``."""
        producer = self.program.buffers[b].producer
        assert producer is not None
        output = self.program.ops[producer].outputs.index(b)
        place = self.repeats.place(producer)
        if place is None:
            return self.number[producer, -1], output
        region = self.repeats.regions[place[0]]
        theirs = region.coordinate(place[1])
        moved = self._moved(theirs)
        if coordinate >= 0 and not self._is_absolute(reader, b):
            moved = coordinate + theirs - self._original(coordinate)
            block = region.sign * (self._original(moved) - region.shift) if moved >= 0 else -1
            producer = region.first + block * region.period + place[2]
            if not 0 <= block < region.blocks:
                return None
        found = None if moved is None else self.number.get((producer, moved))
        return None if found is None else (found, output)

    def _is_absolute(self, reader: int, b: int) -> bool:
        """Whether the reader's counterpart in the next block, or the one before, reads the very same buffer."""
        place = self.repeats.place(reader)
        assert place is not None
        region = self.repeats.regions[place[0]]
        counterpart = reader + region.period if place[1] + 1 < region.blocks else reader - region.period
        return b in self.program.ops[counterpart].inputs

    def _program(self) -> Program:
        program = self.program
        tangents = {b: i for i, b in enumerate(program.tangents)}
        buffers = [program.buffers[b] for b in program.tangents]
        first: list[int] = []
        kept: dict[str, list[int]] = {"forward_outputs": [], "gradients": [], "mutations": []}
        sets = {key: frozenset(getattr(program, key)) for key in kept}
        for key, members in sets.items():
            kept[key] += [tangents[b] for b in members if b in tangents]
        for new, op in enumerate(self.origin):
            first.append(len(buffers))
            for b in program.ops[op].outputs:
                for key, members in sets.items():
                    if b in members:
                        kept[key].append(len(buffers))
                buffers.append(Buffer(program.buffers[b].name, program.buffers[b].bytes, new))
        ops: list[Op] = []
        for new, op in enumerate(self.origin):
            inputs: set[int] = set()
            for b in program.ops[op].inputs:
                if b in tangents:
                    inputs.add(tangents[b])
                elif (made := self._read(op, self.places[new], b)) is not None and made[0] < new:
                    inputs.add(first[made[0]] + made[1])
            count = len(program.ops[op].outputs)
            outputs = tuple(range(first[new], first[new] + count))
            name = f"{program.ops[op].name}@{self.places[new]}" if self.places[new] >= 0 else program.ops[op].name
            ops.append(replace(program.ops[op], name=name, inputs=tuple(sorted(inputs)), outputs=outputs, until=()))
        boundary = sum(1 for op in self.origin if op < program.boundary)
        # An output in the middle of the blocks may have lost all readers; a mutation never has any.
        return replace(
            program,
            ops=tuple(ops),
            buffers=tuple(buffers),
            boundary=boundary,
            **{key: tuple(members) for key, members in kept.items()},
        )


@dataclass(frozen=True)
class IsomorphicOps:
    """Ops and buffers of a small program that stand for those of a large one.

    Attributes:
        op: per op of the large program one of the small; -1 where there is none.
        buffer: per buffer likewise.
    """

    op: Sequence[int]
    buffer: Sequence[int]


def isomorphic_ops(small: Repeats, large: Repeats, stands_for: Sequence[int]) -> IsomorphicOps:
    """Find for each op and buffer of a large program the one that stands for it; arguments as for :func:`carry`."""
    op = np.full(len(large.program.ops), -1, np.int64)
    for theirs, ours in _outside(small, large).items():
        op[ours] = theirs
    blocks = np.array(stands_for, np.int64)
    for ours, theirs in zip(large.regions, small.regions, strict=True):
        coordinates = ours.coordinate(0) + ours.sign * np.arange(ours.blocks)
        known = (coordinates >= 0) & (coordinates < len(blocks))
        source = np.full(ours.blocks, -1, np.int64)
        source[known] = theirs.sign * (blocks[coordinates[known]] - theirs.shift)
        source[(source < 0) | (source >= theirs.blocks)] = -1
        block = np.where(source < 0, -1, theirs.first + source * theirs.period)
        found = block[:, None] + np.arange(ours.period)
        op[ours.first : ours.end] = np.where(block[:, None] < 0, -1, found).ravel()
    mine, other = flat(large.program), flat(small.program)
    owner, made = mine.makes.owner, mine.makes.items
    position = np.arange(len(made)) - mine.makes.first[owner]
    of = op[owner] >= 0
    buffer = np.full(len(mine.bytes), -1, np.int64)
    buffer[made[of]] = other.makes.items[other.makes.first[op[owner[of]]] + position[of]]
    return IsomorphicOps(op.tolist(), buffer.tolist())


def carry(
    reruns: Sequence[tuple[int, int]], small: Repeats, large: Repeats, stands_for: Sequence[int]
) -> list[tuple[int, int]]:
    """Reruns of a program carried to one with more blocks (definition 5).

    Args:
        reruns: ``(op, stage)`` of the small program.
        small: its regions.
        large: those of the other program, made from it or the reverse by :func:`with_blocks`.
        stands_for: per coordinate of the large program, the one of the small program whose reruns it takes.

    Returns:
        ``(op, stage)`` of the large program.
    """
    by_op: dict[int, list[int]] = {}  # outside the regions
    by_block: dict[tuple[int, int], list[tuple[int, int]]] = {}  # region and block -> position and stage
    for op, stage in sorted(reruns, key=lambda run: run[0]):
        place = small.place(op)
        if place is None:
            by_op.setdefault(op, []).append(stage)
        elif stage < len(small.program.ops):
            by_block.setdefault(place[:2], []).append((place[2], stage))
    outside = _outside(small, large)
    found: list[tuple[int, int]] = []

    def moved(op: int, coordinate: int, new: int) -> int | None:
        """The large program's op for an op of the small one, seen from a block that moved to ``new``."""
        place = small.place(op)
        if place is None:
            return outside.get(op)
        theirs = small.regions[place[0]].coordinate(place[1])
        region = large.regions[place[0]]
        target = new + theirs - coordinate
        block = region.sign * (target - region.shift)
        return region.first + block * region.period + place[2] if 0 <= block < region.blocks else None

    for op, new in outside.items():
        for stage in by_op.get(op, ()):
            at = outside.get(stage)
            if at is not None:
                found.append((new, at))
    for number, region in enumerate(large.regions):
        ours = small.regions[number]
        for block in range(region.blocks):
            new = region.coordinate(block)
            old = stands_for[new] if 0 <= new < len(stands_for) else -1
            source = ours.sign * (old - ours.shift)
            if not 0 <= source < ours.blocks:
                continue
            for position, stage in by_block.get((number, source), ()):
                at = moved(stage, old, new)
                if at is not None:
                    found.append((region.first + block * region.period + position, at))
    return found


def _outside(small: Repeats, large: Repeats) -> dict[int, int]:
    """Ops of the small program outside all regions, with those of the large one that they stand for."""
    ends = [0, *(region.end for region in small.regions)], [0, *(region.end for region in large.regions)]
    starts = (
        [*(r.first for r in small.regions), len(small.program.ops)],
        [*(r.first for r in large.regions), len(large.program.ops)],
    )
    found: dict[int, int] = {}
    for begin, end, other in zip(ends[0], starts[0], ends[1], strict=True):
        found.update((op, other + op - begin) for op in range(begin, end))
    return found

"""A step of several captured graphs as one program, and a schedule of it cut back into theirs.

Definitions:
1. A *piece* is one captured graph: a program, and which of its ops read what other parts of the step give. Code
   between pieces that runs as in eager, a *gap*, is a piece of one op each way that may not run again.
2. An *occurrence* is one run of a piece in a step, with where its inputs come from.
3. The *stitched* program has the forwards in the order in which they ran, one boundary, and the backwards in reverse.
   An output of a piece is an input of a later one: it is made once, since eager's code between holds that tensor.
4. What autograd holds: a piece's node keeps its inputs and its tangents until it returns, so the last op of its
   backward reads them.
5. Several readers of one output give it a gradient each; autograd adds one to the other as they come, and so do ops
   of the stitching, at the end of the backward that brings the next. A weight of several occurrences has its second
   and later gradients added to the first in place.
6. The *window* of an occurrence in the forward is from its first op to the first op of the next one, in the backward
   likewise. A rerun is *at home* in a window of its own occurrence: no graph runs an op for another. One that a planner
   has put elsewhere moves to the begin of its own backward, where nobody has missed it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Schedule

__all__ = ["Input", "Occurrence", "Output", "Piece", "Stitched", "stitch"]

SUM, ZEROS, ACCUMULATE = "ebbtide.sum_of_gradients", "ebbtide.zero_gradient", "ebbtide.accumulate_gradient"
"""Targets of ops that stand between pieces: definition 5, and for an output that nobody gives a gradient."""


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that another part of the step gives to a piece.

    Attributes:
        readers: ops of the piece that read it, ascending.
        gradient: the buffer of its gradient; ``None`` where none is taken.
    """

    readers: tuple[int, ...]
    gradient: int | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a piece gives to others.

    Attributes:
        buffer: that holds it; -1 for what is none of the program's, a view of an input.
        tangent: what its backward starts from; ``None`` for what takes no gradient.
    """

    buffer: int
    tangent: int | None = None


@dataclass(frozen=True)
class Piece:
    """Definition 1.

    Attributes:
        program: its ops; of its gradients those of weights stay, those of inputs go to who made these.
        inputs: in the order in which an occurrence names their sources.
        outputs: likewise.
        weights: buffers of gradients that are of weights.
    """

    program: Program
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    weights: tuple[int, ...] = ()


@dataclass(frozen=True)
class Occurrence:
    """Definition 2.

    Attributes:
        piece: that runs.
        sources: per input of the piece an earlier occurrence and which of its outputs; ``None`` for what the step was
            called with.
        weights: whose the gradients of the piece's ``weights`` are; empty if no other occurrence has one of them.
    """

    piece: Piece
    sources: tuple[tuple[int, int] | None, ...]
    weights: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stitched:
    """Definition 3.

    Attributes:
        program: of the whole step.
        occurrences: in the order of their forwards.
        owners: per op, whose it is and which of that piece's ops; -1 for an op of the stitching.
    """

    program: Program
    occurrences: tuple[Occurrence, ...]
    owners: tuple[tuple[int, int], ...]

    def at_home(self, order: Sequence[int | None]) -> list[int | None]:
        """``order`` with every rerun in a window of its own (definition 6); one that comes too late serves nobody."""
        ran: set[int] = set()
        away: dict[int, list[int]] = {}
        found: list[int | None] = []
        window = -1
        for op in order:
            if op is None:
                found.append(None)
                window = -1
                continue
            owner = self.owners[op][0]
            if op not in ran:
                ran.add(op)
                if owner != window:
                    window = owner
                    found += away.pop(owner, [])
            elif owner != window:
                away.setdefault(owner, []).append(op)
                continue
            found.append(op)
        return found

    def joined(self, schedules: Sequence[Schedule]) -> Schedule:
        """A schedule of the whole step in which each occurrence runs its own, and the stitching its ops."""
        placed = {owner: op for op, owner in enumerate(self.owners)}
        order: list[int | None] = []
        begun: set[tuple[int, bool]] = set()
        for op, (run, own) in enumerate(self.owners):
            after = op >= self.program.boundary
            if after and None not in order:
                order.append(None)
            if own < 0:
                order.append(op)
            elif (run, after) not in begun:
                begun.add((run, after))
                computes = list(schedules[run].computes)
                boundary = computes.index(None)
                part = computes[boundary + 1 :] if after else computes[:boundary]
                order += [placed[run, each] for each in part if each is not None]
        if None not in order:
            order.append(None)
        return Schedule.from_computes(self.program, order)

    def cut(self, schedule: Schedule) -> tuple[Schedule, ...]:
        """What each occurrence runs of a schedule whose reruns are at home, as a schedule of its piece's program."""
        orders: list[list[int | None]] = [[] for _ in self.occurrences]
        for op in schedule.computes:
            if op is None:
                for each in orders:
                    each.append(None)
            elif (run := self.owners[op])[1] >= 0:
                orders[run[0]].append(run[1])
        return tuple(
            Schedule.from_computes(occurrence.piece.program, order)
            for occurrence, order in zip(self.occurrences, orders, strict=True)
        )


def stitch(name: str, occurrences: Sequence[Occurrence]) -> Stitched:
    """The program of a step that runs ``occurrences`` in this order: definitions 3 to 5.

    What no later occurrence takes is returned by the step; its tangents come from outside.

    Raises:
        ValueError: if an occurrence takes what no earlier one gives.
    """
    thread = _Thread(tuple(occurrences))
    for index in range(len(occurrences)):
        thread.forward(index)
    boundary = len(thread.ops)
    for index in reversed(range(len(occurrences))):
        thread.backward(index)
    first = occurrences[0].piece.program
    program = Program(
        name,
        tuple(thread.ops),
        tuple(thread.buffers),
        boundary,
        forward_outputs=tuple(thread.returned),
        gradients=tuple(thread.gradients),
        mutations=tuple(thread.mutations),
        resident_bytes=max(each.piece.program.resident_bytes for each in occurrences),
        context=dict(first.context),
    )
    return Stitched(program, tuple(occurrences), tuple(thread.owners))


class _Thread:
    """What goes through the pieces."""

    def __init__(self, occurrences: tuple[Occurrence, ...]) -> None:
        self.occurrences = occurrences
        self.ops: list[Op] = []
        self.buffers: list[Buffer] = []
        self.owners: list[tuple[int, int]] = []
        self.mutations: list[int] = []
        self.gradients: list[int] = []
        self.known: list[dict[int, int]] = [{} for _ in occurrences]
        """Per occurrence, the buffer here for each of its piece's."""
        self.placed: list[dict[int, int]] = [{} for _ in occurrences]
        """Per occurrence, the op here for each of its piece's."""
        self.given: dict[tuple[int, int], int] = {}
        """Per output of an occurrence, the gradient that later ones have given it."""
        self.weights: set[str] = set()
        """Those that have a gradient."""
        self.taken = {source for each in occurrences for source in each.sources if source is not None}

    @property
    def returned(self) -> list[int]:
        """What forwards return and no later occurrence takes."""
        found: list[int] = []
        for index, each in enumerate(self.occurrences):
            outputs = enumerate(each.piece.outputs)
            taken = {output.buffer for number, output in outputs if (index, number) in self.taken}
            found += [self.known[index][b] for b in each.piece.program.forward_outputs if b not in taken]
        return found

    def forward(self, index: int) -> None:
        """The forward ops of an occurrence."""
        piece = self.occurrences[index].piece
        given = {each.buffer for each in piece.outputs}
        for op in range(piece.program.boundary):
            self._add(index, op, stays=not given.isdisjoint(piece.program.ops[op].outputs))
        self.mutations += [self.known[index][each] for each in piece.program.mutations]

    def backward(self, index: int) -> None:
        """The backward ops of an occurrence, and what autograd does with its gradients."""
        piece = self.occurrences[index].piece
        program, known = piece.program, self.known[index]
        for number, output in enumerate(piece.outputs):
            if output.tangent is None or output.tangent in known:
                continue
            bytes_ = program.buffers[output.tangent].bytes
            if (index, number) in self.given:
                known[output.tangent] = self.given[index, number]
            elif (index, number) in self.taken:
                known[output.tangent] = self._between(index, ZEROS, (), bytes_)
            else:
                known[output.tangent] = self._buffer(f"{index}.tangent{number}", bytes_, None)
        given = {each.gradient for each in piece.inputs}  # a graph returns the first copy that it makes
        for op in range(program.boundary, len(program.ops)):
            stays = not given.isdisjoint(program.ops[op].outputs)
            self._add(index, op, stays=stays, last=op == len(program.ops) - 1)
        self._give(index)

    def _give(self, index: int) -> None:
        """Gradients of weights stay or are added to those that do; those of inputs go to who made these."""
        occurrence, known = self.occurrences[index], self.known[index]
        again: list[int] = []
        weights = occurrence.piece.weights
        for buffer, name in zip(weights, occurrence.weights or [""] * len(weights), strict=True):
            if name and name in self.weights:
                again.append(known[buffer])
            else:
                self.gradients.append(known[buffer])
            self.weights.add(name)
        if again:
            self._between(index, ACCUMULATE, tuple(sorted(again)), 0)
        for taken, source in zip(occurrence.piece.inputs, occurrence.sources, strict=True):
            if source is None or taken.gradient is None:
                continue
            gradient = known[taken.gradient]
            if source in self.given and self.given[source] != gradient:
                both = tuple(sorted((self.given[source], gradient)))
                gradient = self._between(index, SUM, both, self.buffers[gradient].bytes)
            self.given[source] = gradient

    def _add(self, index: int, op: int, *, stays: bool = False, last: bool = False) -> None:
        occurrence, known = self.occurrences[index], self.known[index]
        program = occurrence.piece.program
        made = program.ops[op]
        for b in made.outputs:
            buffer = program.buffers[b]
            known[b] = self._buffer(f"{index}.{buffer.name}", buffer.bytes, len(self.ops), whole=buffer.whole)
        read = {known[b] for b in made.inputs}
        for taken, source in zip(occurrence.piece.inputs, occurrence.sources, strict=True):
            if source is not None and taken.readers and (last or op in taken.readers):
                if (output := self._output(index, source)) is not None:
                    read.add(output)
        if last:
            read |= {known[each.tangent] for each in occurrence.piece.outputs if each.tangent is not None}
        self.placed[index][op] = len(self.ops)
        self.ops.append(
            replace(
                made,
                name=f"{index}.{made.name}",
                inputs=tuple(sorted(read)),
                outputs=tuple(known[b] for b in made.outputs),
                rerunnable=made.rerunnable and not stays,
                once=0 if stays else made.once,
            )
        )
        self.owners.append((index, op))

    def _output(self, index: int, source: tuple[int, int]) -> int | None:
        """``None`` for one that is none of its giver's buffers."""
        giver, number = source
        if not giver < index:
            raise ValueError(f"occurrence {index} takes what occurrence {giver} gives, which does not come before it")
        return self.known[giver].get(self.occurrences[giver].piece.outputs[number].buffer)

    def _between(self, index: int, target: str, inputs: tuple[int, ...], size: int) -> int:
        """An op of the stitching, at the present end of the program; its output."""
        made = self._buffer(f"{index}.{target.rpartition('.')[2]}", size, len(self.ops))
        name = f"{index}.{target}{len(self.ops)}"
        self.ops.append(Op(name, target, inputs, (made,), rerunnable=False))
        self.owners.append((index, -1))
        return made

    def _buffer(self, name: str, size: int, producer: int | None, *, whole: bool = True) -> int:
        self.buffers.append(Buffer(name, size, producer, whole))
        return len(self.buffers) - 1

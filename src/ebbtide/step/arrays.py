"""A program and a schedule as flat arrays: what analyses of large programs read instead of objects, op by op.

Lists of lists are stored as *links*: all lists one after the other, and where each begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbtide.step.program import Program, analysis

__all__ = ["Flat", "Ints", "Links", "flat", "links"]

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Links:
    """Lists of indices, one after the other.

    Attributes:
        first: shape ``(lists + 1,)``: where each list begins, and where the last one ends.
        items: shape ``(first[-1],)``: the members of all lists.
        owner: shape ``(first[-1],)``: to which list each member belongs.
    """

    first: Ints
    items: Ints
    owner: Ints

    def of(self, lists: Ints) -> tuple[Ints, Ints]:
        """The members of some lists, in the order given; with the place in ``lists`` of the list of each."""
        counts = self.first[lists + 1] - self.first[lists]
        where = np.repeat(np.arange(len(lists)), counts)
        within = np.arange(len(where)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.items[np.repeat(self.first[lists], counts) + within], where


@dataclass(frozen=True, slots=True)
class Flat:
    """The numbers of a program, in arrays.

    Attributes:
        reads: per op, the buffers it reads.
        makes: per op, the buffers it creates.
        readers: per buffer, the ops that read it, ascending.
        bytes: shape ``(buffers,)``.
        producer: shape ``(buffers,)``: the op that creates it, -1 for tangents.
        pinned: shape ``(buffers,)``.
        mutation: shape ``(buffers,)``.
        seconds: shape ``(ops,)``.
        workspace_bytes: shape ``(ops,)``.
        state_bytes: shape ``(ops,)``.
        made_bytes: shape ``(ops,)``: of all outputs.
        remade_bytes: shape ``(ops,)``: of the outputs that a rerun makes.
        rerunnable: shape ``(ops,)``.
        reads_mutated: shape ``(ops,)``.
    """

    reads: Links
    makes: Links
    readers: Links
    bytes: Ints
    producer: Ints
    pinned: Flags
    mutation: Flags
    seconds: NDArray[np.float64]
    workspace_bytes: Ints
    state_bytes: Ints
    made_bytes: Ints
    remade_bytes: Ints
    rerunnable: Flags
    reads_mutated: Flags

    def arrays(self) -> Iterator[NDArray[Any]]:
        """All of them, in a fixed order: programs in which they are equal have the same bytes and seconds."""
        for field in fields(self):
            value = getattr(self, field.name)
            yield from (value.first, value.items) if isinstance(value, Links) else (value,)

    def last_readers(self) -> Ints:
        """Per buffer the last op that reads it, -1 if none does."""
        ends = self.readers.first
        found = np.full(len(self.bytes), -1, np.int64)
        read = ends[1:] > ends[:-1]
        found[read] = self.readers.items[ends[1:][read] - 1]
        return found


def links(lists: Sequence[Sequence[int]]) -> Links:
    """``lists`` as links."""
    first = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=first[1:])
    items = np.fromiter(chain.from_iterable(lists), np.int64, int(first[-1]))
    return Links(first, items, np.repeat(np.arange(len(lists)), np.diff(first)))


@analysis
def flat(program: Program) -> Flat:
    """The arrays of ``program``."""
    ops, buffers = program.ops, program.buffers
    n, count = len(ops), len(buffers)
    reads, makes = links([op.inputs for op in ops]), links([op.outputs for op in ops])
    size = np.fromiter((buffer.bytes for buffer in buffers), np.int64, count)
    once = np.fromiter((op.once for op in ops), np.int64, n)
    # Outputs that only the first run makes are the last ones of their op.
    again = np.arange(len(makes.items)) < np.repeat(makes.first[1:] - once, np.diff(makes.first))
    return Flat(
        reads=reads,
        makes=makes,
        readers=_turned(reads, count),
        bytes=size,
        producer=np.fromiter((-1 if b.producer is None else b.producer for b in buffers), np.int64, count),
        pinned=_flags(program.pinned, count),
        mutation=_flags(program.mutations, count),
        seconds=np.fromiter((op.seconds for op in ops), np.float64, n),
        workspace_bytes=np.fromiter((op.workspace_bytes for op in ops), np.int64, n),
        state_bytes=np.fromiter((op.state_bytes for op in ops), np.int64, n),
        made_bytes=_sums(makes, size[makes.items]),
        remade_bytes=_sums(makes, np.where(again, size[makes.items], 0)),
        rerunnable=np.fromiter((op.rerunnable for op in ops), np.bool_, n),
        reads_mutated=np.fromiter((op.reads_mutated for op in ops), np.bool_, n),
    )


def _turned(reads: Links, count: int) -> Links:
    """Who has each of ``count`` items in its list, ascending."""
    order = np.argsort(reads.items, kind="stable")
    first = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(reads.items, minlength=count), out=first[1:])
    return Links(first, reads.owner[order], reads.items[order])


def _sums(lists: Links, values: Ints) -> Ints:
    """Per list, the sum of the values of its members."""
    total = np.concatenate([[0], np.cumsum(values)]).astype(np.int64)
    return total[lists.first[1:]] - total[lists.first[:-1]]


def _flags(members: Iterable[int], count: int) -> Flags:
    found = np.zeros(count, np.bool_)
    found[np.fromiter(members, np.int64)] = True
    return found

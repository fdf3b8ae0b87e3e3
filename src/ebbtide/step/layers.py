"""The program of a model with many layers alike, from those of the same model with few of them.

Definitions:
1. A *row* is what one op says: a text in which whole numbers stand, such as ``mm_7`` or ``blocks.2.up``, and constants,
   such as its bytes. A *sequence* of rows is the forward's ops, or the backward's.
2. A sequence is *regular* in a number of layers if it is a beginning, a part for each layer but the first and the last,
   and an end, where rows in the same place of these parts have the same constants and the same text but for numbers,
   and each number is affine in the layer's position and in how many layers there are.
3. What is regular in two numbers of layers is taken to be regular in any. All of both is checked: with three and five
   layers, four parts of a layer and two of each beginning and end.

A layer that is not like its neighbours, or an op that reads something of every layer, makes a sequence irregular: then
there is no answer, and the model has to be captured as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ebbtide.step.program import Buffer, Op, Program

__all__ = ["Layers", "grown", "grown_program"]

Constants = TypeVar("Constants", bound=Hashable)
_NUMBERS = re.compile(r"(\d+)")
_FLOATS = re.compile(r"\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+")
_HIDDEN = {ord(digit): chr(0xE000 + index) for index, digit in enumerate("0123456789")}
_SHOWN = {ord(hidden): chr(digit) for digit, hidden in _HIDDEN.items()}
_FIELD, _PART = "\x1f", "\x1e"


@dataclass(frozen=True)
class Layers:
    """Numbers of layers.

    Attributes:
        few: of the smaller model, 3 or more.
        more: of the larger one, at least 2 more.
        all: of the one that is asked for.
    """

    few: int
    more: int
    all: int


class _Irregular(Exception):
    """There is no answer."""


@dataclass(frozen=True)
class _Place(Generic[Constants]):
    """Rows in one place: texts between numbers, and each number as ``(start, by position, by layers)``."""

    texts: tuple[str, ...]
    numbers: tuple[tuple[int, int, int], ...]
    constants: Constants

    def row(self, position: int, layers: int) -> tuple[str, Constants]:
        """The row of the layer in ``position``, of so many layers more than there were in the smaller model."""
        parts = [self.texts[0]]
        for text, (start, by_position, by_layers) in zip(self.texts[1:], self.numbers, strict=True):
            parts += str(start + by_position * position + by_layers * layers), text
        return "".join(parts), self.constants


def _place(few: Sequence[tuple[str, Constants]], more: Sequence[tuple[str, Constants]], step: int) -> _Place[Constants]:
    """What rows of one place have in common, in order of position; ``step`` is how many layers ``more`` has more.

    Raises:
        _Irregular: if they are not alike.
    """
    if len({constants for _, constants in (*few, *more)}) > 1:
        raise _Irregular
    small, large = [[_NUMBERS.split(text) for text, _ in rows] for rows in (few, more)]
    first = small[0]
    if any(each[::2] != first[::2] for each in (*small, *large)):
        raise _Irregular
    texts, numbers = [first[0]], list[tuple[int, int, int]]()
    for index in range(1, len(first), 2):
        told = [each[index] for each in (*small, *large)]
        if told.count(told[0]) == len(told):
            texts[-1] += first[index] + first[index + 1]
            continue
        if any(len(each) > 1 and each[0] == "0" for each in told):
            raise _Irregular
        lows, highs = [int(each[index]) for each in small], [int(each[index]) for each in large]
        by_position = highs[1] - highs[0] if len(highs) > 1 else 0
        by_layers, left = divmod(highs[0] - lows[0], step)
        numbers.append((lows[0], by_position, by_layers))
        texts.append(first[index + 1])
        expected = [lows[0] + by_position * each for each in range(len(lows))]
        expected += [lows[0] + by_layers * step + by_position * each for each in range(len(highs))]
        if left or expected != [*lows, *highs]:
            raise _Irregular
    return _Place(tuple(texts), tuple(numbers), few[0][1])


def grown(
    few: Sequence[tuple[str, Constants]], more: Sequence[tuple[str, Constants]], layers: Layers
) -> list[tuple[str, Constants]] | None:
    """The rows of all layers, from those of few and of more; ``None`` if these are not regular (definition 2).

    Args:
        few: text and constants of each row.
        more: likewise.
        layers: how many there are.
    """
    step = layers.more - layers.few
    size, left = divmod(len(more) - len(few), step)
    if left or size < 0:
        return None
    parts, most = layers.few - 2, layers.more - 2
    keys = [[(_NUMBERS.sub("#", text), constants) for text, constants in rows] for rows in (few, more)]
    for begin in range(len(few) - parts * size + 1) if size else (0,):
        end, late = begin + parts * size, begin + most * size
        if keys[0][:begin] != keys[1][:begin]:
            return None
        if keys[0][end:] != keys[1][late:] or keys[1][begin : late - size] != keys[1][begin + size : late]:
            continue
        try:
            before = [_place(few[each : each + 1], more[each : each + 1], step) for each in range(begin)]
            period = [_place(few[at:end:size], more[at:late:size], step) for at in range(begin, begin + size)]
            after = [_place([mine], [theirs], step) for mine, theirs in zip(few[end:], more[late:], strict=True)]
        except _Irregular:
            continue
        extra = layers.all - layers.few
        return [
            *(each.row(0, extra) for each in before),
            *(each.row(position, extra) for position in range(layers.all - 2) for each in period),
            *(each.row(0, extra) for each in after),
        ]
    return None


def grown_program(few: Program, more: Program, layers: Layers) -> Program | None:
    """The program of all layers, with the costs of ``few`` and ``more``; ``None`` if these are not regular.

    Args:
        few: with ``layers.few`` layers.
        more: with ``layers.more``.
        layers: how many there are.
    """
    if _frame(few) != _frame(more):
        return None
    forward = grown([*_rows(few, forward=True)], [*_rows(more, forward=True)], layers)
    backward = grown([*_rows(few, forward=False)], [*_rows(more, forward=False)], layers)
    grows, left = divmod(more.resident_bytes - few.resident_bytes, layers.more - layers.few)
    if forward is None or backward is None or left:
        return None
    ops: list[Op] = []
    buffers = {index: few.buffers[index] for index in few.tangents}
    kept: dict[str, list[int]] = {name: [] for name in _KEPT}
    for index, (text, said) in enumerate((*forward, *backward)):
        op, names = _read(text, said)
        ops.append(op)
        for b, name, (buffer, keeping) in zip(op.outputs, names, said.made, strict=True):
            buffers[b] = replace(buffer, name=name, producer=index)
            for each in keeping:
                kept[each].append(b)
    try:
        return replace(
            few,
            ops=tuple(ops),
            buffers=tuple(buffers[b] for b in range(len(buffers))),
            boundary=len(forward),
            resident_bytes=few.resident_bytes + grows * (layers.all - layers.few),
            **{name: tuple(sorted(found)) for name, found in kept.items()},
        )
    except (KeyError, ValueError):  # numbers that are affine and no program
        return None


_KEPT = ("forward_outputs", "gradients", "mutations")


def _frame(program: Program) -> Hashable:
    """What does not change with the number of layers, if buffers that stay are told in ascending order."""
    if any(list(getattr(program, name)) != sorted(set(getattr(program, name))) for name in _KEPT):
        return object()  # like nothing else
    tangents = tuple((index, program.buffers[index]) for index in program.tangents)
    context = tuple(sorted(program.context.items()))
    return (program.name, program.between_bytes, program.held_bytes, context, tangents)


@dataclass(frozen=True)
class _Said:
    """The constants of an op's row.

    Attributes:
        op: without what its text says.
        made: each buffer that it makes, without its name and its producer, and the lists that it stands in.
        views: how many the text tells.
    """

    op: Op
    made: tuple[tuple[Buffer, tuple[str, ...]], ...]
    views: int


def _rows(program: Program, *, forward: bool) -> Iterator[tuple[str, _Said]]:
    kept = {name: frozenset(getattr(program, name)) for name in _KEPT}
    for op in program.ops[: program.boundary] if forward else program.ops[program.boundary :]:
        fields = (op.name, op.target, op.repeat, op.source, op.module, _without_floats(op.signature))
        indices = (" ".join(map(str, each)) for each in (op.inputs, op.outputs, op.until))
        names = (program.buffers[b].name for b in op.outputs)
        text = _PART.join(map(_FIELD.join, ((*fields, *indices), map(_without_floats, op.views), names)))
        bare = replace(op, name="", target="", repeat="", source="", module="", signature="", inputs=(), outputs=())
        made = (
            (replace(program.buffers[b], name="", producer=None), tuple(name for name in _KEPT if b in kept[name]))
            for b in op.outputs
        )
        yield text, _Said(replace(bare, views=(), until=()), tuple(made), len(op.views))


def _without_floats(text: str) -> str:
    """``text`` with other characters for the digits of floats, which are no whole numbers one after the other."""
    return _FLOATS.sub(lambda found: found.group().translate(_HIDDEN), text)


def _read(text: str, said: _Said) -> tuple[Op, list[str]]:
    """The op of a row, and the names of the buffers that it makes."""
    fields, views, names = text.translate(_SHOWN).split(_PART)
    name, target, repeat, source, module, signature, *indices = fields.split(_FIELD)
    inputs, outputs, until = (tuple(map(int, each.split())) for each in indices)
    told = {"name": name, "target": target, "repeat": repeat, "source": source, "module": module}
    op = replace(said.op, **told, signature=signature, inputs=inputs, outputs=outputs, until=until)
    return replace(op, views=tuple(views.split(_FIELD)) if said.views else ()), names.split(_FIELD)

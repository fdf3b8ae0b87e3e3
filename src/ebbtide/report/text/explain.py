"""What a plan does with one tensor, and why: the text behind ``Plan.explain``.

Definitions:
1. A word names a buffer if it is the buffer's or its op's name, its op's module or its source line; else if it
   begins such a module or line at a dot or colon; else if it is part of one of them. The first that finds anything
   holds.
2. A *copy* of a buffer is what ``report.records.copies`` calls so.
3. The *chain* of a rerun is every other rerun whose results it needed, directly or not; others may use them too.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from ebbtide.errors import UsageError
from ebbtide.report.records.copies import Copy, copies_of
from ebbtide.report.records.decisions import why_of
from ebbtide.step.program import Op, Program
from ebbtide.step.schedule import Compute, Free, Offload, Reload, Schedule
from ebbtide.step.simulate import Timeline
from ebbtide.units import format_bytes, format_count, format_seconds

__all__ = ["explain"]

_SHOWN_BUFFERS = 10
_SHOWN_OPS = 4


def explain(program: Program, schedule: Schedule, timeline: Timeline, tensor: str, rewrites: Sequence[str] = ()) -> str:
    """What happens to the buffers that ``tensor`` names, largest first.

    Args:
        program: what is planned.
        schedule: the plan's.
        timeline: the schedule's.
        tensor: definition 1.
        rewrites: what took the place of parts of the captured step, which are no buffers of the program.

    Raises:
        UsageError: if no buffer matches, with what comes close.
    """
    if not isinstance(tensor, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"explain takes the name of a buffer, a module path or a source line, not {type(tensor).__name__}",
            argument="tensor",
            value=tensor,
        )
    found = sorted(_matches(program, tensor, rewrites), key=lambda b: (-program.buffers[b].bytes, b))
    story = _Story(program, schedule, timeline)
    lines = [
        story.peak(),
        *(f"rewritten: {each}" for each in rewrites),
        *(line for b in found[:_SHOWN_BUFFERS] for line in story.of(b)),
    ]
    rest = found[_SHOWN_BUFFERS:]
    if rest:
        total = format_bytes(sum(program.buffers[b].bytes for b in rest))
        lines.append(f"and {len(rest)} smaller ones, {total} in all; name one of them, or a line, to see it")
    return "\n".join(lines)


# -- which buffers --------------------------------------------------------------------------------------------


def _words(program: Program, buffer: int) -> tuple[str, ...]:
    """What the buffer goes by."""
    made = program.buffers[buffer]
    op = program.ops[made.producer] if made.producer is not None else None
    words = (made.name, op.name, op.module, op.source) if op is not None else (made.name,)
    return tuple(filter(None, words))


def _matches(program: Program, tensor: str, rewrites: Sequence[str]) -> list[int]:
    """Buffers that ``tensor`` may name, by the closest kind of match (definition 1)."""
    words = [_words(program, b) for b in range(len(program.buffers))]
    tests: tuple[Callable[[str], bool], ...] = (
        lambda word: word == tensor,
        lambda word: word.startswith((f"{tensor}.", f"{tensor}:")),
        lambda word: tensor in word,
    )
    for fits in tests:
        found = [b for b, own in enumerate(words) if any(fits(word) for word in own)]
        if found:
            return found
    known = sorted({word for own in words for word in own})
    close = difflib.get_close_matches(tensor, known, n=5, cutoff=0.5) or known[:5]
    raise UsageError(
        f"no buffer of the plan matches {tensor!r}: give a buffer's name, a module path or a source line, "
        f"such as {', '.join(map(repr, close)) or 'none: the plan has no buffers'}"
        + (f". What was rewritten has no buffers of its own: {'; '.join(rewrites)}" if rewrites else "")
    )


# -- what the schedule does with them -------------------------------------------------------------------------


class _Story:
    """Tells what a schedule does with one buffer at a time."""

    def __init__(self, program: Program, schedule: Schedule, timeline: Timeline) -> None:
        self._program = program
        self._actions = schedule.actions
        self._timeline = timeline
        self._copies = copies_of(program, schedule)
        self._tier = {each.buffer: each.tier for each in schedule.actions if isinstance(each, Offload)}

    def of(self, buffer: int) -> Iterator[str]:
        """The lines for ``buffer``."""
        program, made = self._program, self._program.buffers[buffer]
        op = program.ops[made.producer] if made.producer is not None else None
        origin = f"made by {_named(op)}" if op is not None else "a tangent: it appears at the boundary"
        yield f"{made.name}: {format_bytes(made.bytes)}, {origin}"
        yield f"  read by    {self._readers(buffer)}"
        yield f"  unplanned  {self._unplanned(buffer)}"
        yield f"  plan       {self._decision(buffer)}"
        cost = self._cost(buffer)
        if cost:
            yield f"  cost       {cost}"
        yield f"  at peak    {'live' if self._live_at_the_peak(buffer) else 'not live'}"
        yield from (f"  note       {reason}" for reason in self._reasons(buffer))

    def _readers(self, buffer: int) -> str:
        readers = self._program.readers[buffer]
        named = ", ".join(_named(self._program.ops[r]) for r in readers[:_SHOWN_OPS])
        more = f" and {len(readers) - _SHOWN_OPS} more" if len(readers) > _SHOWN_OPS else ""
        return f"{named}{more}" if readers else "no op"

    def _unplanned(self, buffer: int) -> str:
        program = self._program
        producer, readers = program.buffers[buffer].producer, program.readers[buffer]
        start = "the boundary" if producer is None else f"op {producer}"
        if buffer in program.pinned:
            return f"lives from {start} to the end of the step"
        if buffer in program.mutations:
            return f"lives from {start} to the boundary at op {program.boundary}"
        if not readers:
            return f"lives during {start} only"
        return f"lives from {start} to op {readers[-1]} of {len(program.ops)}"

    def _decision(self, buffer: int) -> str:
        """Kept, or dropped and made again, and between which ops."""
        copies = self._copies[buffer]
        if not copies:
            return "freed as soon as its op ends"
        if len(copies) == 1:
            if buffer in self._program.mutations:
                return "kept until the boundary"
            return "kept until its last reader" if copies[0].end < len(self._actions) else "kept until the step ends"
        moved, made = (
            [
                f"after {self._op_before(before.end)} for {self._next_reader(buffer, after)}"
                for before, after in pairwise(copies)
                if isinstance(self._actions[after.start], Reload) is is_reload
            ]
            for is_reload in (True, False)
        )
        told = [_with_gaps(f"moved to the {self._tier[buffer]} and back", moved)] if moved else []
        return "; ".join([*told, *([_with_gaps("dropped and made again", made)] if made else [])])

    def _op_before(self, index: int) -> str:
        """The last op that runs before action ``index``."""
        ops = (a.op for a in reversed(self._actions[:index]) if isinstance(a, Compute))
        return next((self._program.ops[o].name for o in ops), "the start")

    def _next_reader(self, buffer: int, copy: Copy) -> str:
        for action in self._actions[copy.start + 1 : copy.end]:
            if isinstance(action, Compute) and buffer in self._program.ops[action.op].inputs:
                return self._program.ops[action.op].name
        return "the end"

    def peak(self) -> str:
        """Where the plan has its peak."""
        action = self._actions[self._timeline.peak_action]
        where = _named(self._program.ops[action.op]) if isinstance(action, Compute) else "the boundary"
        return f"the plan has its peak at {where}"

    def _live_at_the_peak(self, buffer: int) -> bool:
        peak = self._timeline.peak_action
        action = self._actions[peak]
        if isinstance(action, Compute) and self._program.buffers[buffer].producer == action.op:
            again = action in self._actions[:peak]
            if not again or buffer in self._program.made_by_rerun(action.op):
                return True
        return any(copy.start <= peak < copy.end for copy in self._copies[buffer])

    def _reasons(self, buffer: int) -> Iterator[str]:
        """Why the buffer stays, or what making it again takes besides time."""
        producer = self._program.buffers[buffer].producer
        op = None if producer is None else self._program.ops[producer]
        for why in why_of(self._program, buffer):
            state = "" if op is None else format_bytes(op.state_bytes)
            yield why.value.format(op="" if op is None else op.name, state=state)

    # -- what reruns cost -----------------------------------------------------------------------------------

    def _cost(self, buffer: int) -> str:
        """Seconds of the reruns that make the buffer again, and of their chains (definition 3), and of its moves."""
        return "; ".join(filter(None, (self._rerun_cost(buffer), self._move_cost(buffer))))

    def _move_cost(self, buffer: int) -> str:
        """Seconds of its transfers, and for how long the ops wait for them."""
        moves = [
            index
            for index, action in enumerate(self._actions)
            if isinstance(action, Offload | Reload) and action.buffer == buffer
        ]
        if not moves:
            return ""
        timeline = self._timeline
        taken = sum(float(timeline.end_seconds[i] - timeline.start_seconds[i]) for i in moves)
        waits = [i for i, w in enumerate(timeline.wait_seconds.tolist()) if w and self._waits_for(i, buffer)]
        waited = sum(float(timeline.wait_seconds[i]) for i in waits)
        return f"{format_seconds(taken)} of transfers, {format_seconds(waited)} of which ops wait for"

    def _waits_for(self, index: int, buffer: int) -> bool:
        """Whether the wait at an action is for a transfer of ``buffer``: it is the one that ends last of them."""
        action = self._actions[index]
        if isinstance(action, Free):
            return action.buffer == buffer
        if not isinstance(action, Compute):
            return False
        here = float(self._timeline.start_seconds[index])
        reloads = (i for i in range(index) if self._actions[i] == Reload(buffer))
        return any(abs(float(self._timeline.end_seconds[i]) - here) < 1e-12 for i in reloads)

    def _rerun_cost(self, buffer: int) -> str:
        """Those of reruns."""
        own = [copy.start for copy in self._copies[buffer][1:] if isinstance(self._actions[copy.start], Compute)]
        producer = self._program.buffers[buffer].producer
        if not own or producer is None:
            return ""
        op = self._program.ops[producer]
        text = f"{format_seconds(len(own) * op.seconds)} for {format_count(len(own), 'run')} of {op.name}"
        chain = self._chain(own)
        if chain:
            names = list(dict.fromkeys(self._program.ops[o].name for o in chain))
            more = f" and {len(names) - _SHOWN_OPS} more" if len(names) > _SHOWN_OPS else ""
            seconds = format_seconds(sum(self._program.ops[o].seconds for o in chain))
            text += (
                f"; {seconds} for {format_count(len(chain), 'run')} before that: {', '.join(names[:_SHOWN_OPS])}{more}"
            )
        return text

    def _chain(self, reruns: list[int]) -> list[int]:
        """Ops of the other reruns that those at the actions ``reruns`` needed, in the order they run."""
        seen = set(reruns)
        stack = list(reruns)
        while stack:
            index = stack.pop()
            action = self._actions[index]
            assert isinstance(action, Compute)
            for b in self._program.ops[action.op].inputs:
                copies = self._copies[b]
                position = next(i for i, copy in enumerate(copies) if copy.start < index < copy.end)
                start = copies[position].start
                if position and start not in seen and isinstance(self._actions[start], Compute):
                    seen.add(start)
                    stack.append(start)
        others = sorted(seen.difference(reruns))
        return [action.op for index in others if isinstance(action := self._actions[index], Compute)]


def _with_gaps(what: str, gaps: list[str]) -> str:
    more = f" and {len(gaps) - _SHOWN_OPS} more" if len(gaps) > _SHOWN_OPS else ""
    times = "once" if len(gaps) == 1 else format_count(len(gaps), "time")
    return f"{what} {times}: {', '.join(gaps[:_SHOWN_OPS])}{more}"


def _named(op: Op) -> str:
    module = f" in {op.module}" if op.module else ""
    return f"{op}{module}"

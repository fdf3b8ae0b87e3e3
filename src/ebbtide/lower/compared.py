"""The dynamic proof of rewrites: what an op gives is held against what it stands for, computed beside it.

1. Right before an op of a rewrite runs for the first time in a step, the part it stands for (``rewrites.replaced``) is
   run on what it is given, and its results are fingerprinted and dropped. When the op has run, its results must have
   the same fingerprints.
2. That is done where the budget has room for it beside what lives then. Where it has not, a sample may be held; else
   the op *rests* on what was measured of the kernels on made-up numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from ebbtide.capture.joint import Captured
from ebbtide.cost.call import Call
from ebbtide.errors import VerificationError
from ebbtide.lower.emit import CLAIM
from ebbtide.lower.fingerprints import fingerprint_of_values
from ebbtide.rewrites.replaced import Replaced, part_of
from ebbtide.step.schedule import Compute
from ebbtide.step.simulate import Timeline

__all__ = ["Holding", "held_ops", "with_holding"]


class How(enum.Enum):
    """By what an op of a rewrite has been checked in a step (definitions 1 and 2)."""

    WHOLE = "held against the captured ops"
    SAMPLED = "held in samples"
    RESTS = "on measured facts"


class Holding:
    """Holds one op.

    Args:
        replaced: what it stands for.
        op: it, in words.
        level_bytes: what lives when it starts, above the step's start.
        room: gives what may live then.
        workspace: of a call, bytes; ``None`` where it is not known.

    Attributes:
        how: it was checked in the last step; ``None`` before the first.
    """

    def __init__(
        self,
        replaced: Replaced,
        op: str,
        level_bytes: int,
        free_bytes: Callable[[], int],
        workspace: Callable[[Call], int | None],
    ) -> None:
        self.replaced = replaced
        self._op = op
        self._level_bytes = level_bytes
        self._room = free_bytes
        self._part = part_of(replaced, self._take, workspace)
        self._keys: dict[int, int] = {}
        self.how: How | None = None

    def before(self, *args: Any) -> None:
        """The op is about to be called with ``args``.

        Raises:
            VerificationError: if a sample does not hold.
        """
        self._keys.clear()
        free = self._room() - self._level_bytes
        part, sample = self._part, self.replaced.sample
        if part is not None and part.bytes <= free:
            self.how = How.WHOLE
            part.graph(*(args[position] for position in self.replaced.inputs))
        elif sample is not None and sample.bytes <= free:
            self.how = How.SAMPLED
            if not sample.holds(args, self._take):
                raise self._other_bits(sample.says)
        else:
            self.how = How.RESTS

    def after(self, results: Any) -> None:
        """The op has given ``results``.

        Raises:
            VerificationError: if they have other bits than those of the part.
        """
        made: Sequence[Tensor] = results if isinstance(results, list | tuple) else (results,)
        for position, known in self._keys.items():
            if fingerprint_of_values(made[position]) != known:
                raise self._other_bits(f"its result {position}")

    def _take(self, position: int, value: Tensor) -> None:
        self._keys[position] = fingerprint_of_values(value)

    def _other_bits(self, what: str) -> VerificationError:
        return VerificationError(
            f"{self._op}, which takes the place of a part of the captured step, gave other bits than that ({what}). No "
            "gradient of this step was handed out. What was measured of the kernels on this device does not hold for "
            'these numbers: fit with rewrites="none", and please report the op',
            buffer=what,
            op=self._op,
        )


def held_ops(
    replaced: Iterable[Replaced],
    captured: Captured,
    actions: Sequence[object],
    timeline: Timeline,
    free_bytes: Callable[[], int],
    workspace: Callable[[Call], int | None],
) -> Iterator[Holding]:
    """One for each op of ``captured`` that stands for something; an op that a later rewrite has taken has none.

    Args:
        replaced: by ops of rewrites.
        captured: the step that runs, with all rewrites in it.
        actions: of its schedule.
        timeline: of that.
        free_bytes: gives what may live, bytes above the step's start.
        workspace: of a call, bytes; ``None`` where it is not known.
    """
    ops = {op.name: index for index, op in enumerate(captured.program.ops)}
    first: dict[int, int] = {}
    for index, action in enumerate(actions):
        if isinstance(action, Compute):
            first.setdefault(action.op, index)
    for each in replaced:
        if each.name in ops:
            op = ops[each.name]
            start = first[op]
            level = int(timeline.live_bytes[start - 1]) if start else 0
            yield Holding(each, str(captured.program.ops[op]), level, free_bytes, workspace)


def with_holding(graphs: Collection[fx.GraphModule], holding: Iterable[Holding]) -> None:
    """Let the two lowered graphs call each of ``holding`` around the first run of its op; they are changed."""
    pending = {each.replaced.name: each for each in holding}
    for module in graphs:
        for node in list(module.graph.nodes):
            claim = node.meta.get(CLAIM)
            if node.op != "call_function" or claim is None or node.target is not claim.target:
                continue
            if (held := pending.pop(claim.name, None)) is None:
                continue
            with module.graph.inserting_before(node):
                module.graph.call_function(held.before, tuple(node.args))
            with module.graph.inserting_after(node):
                module.graph.call_function(held.after, (node,))
        module.recompile()

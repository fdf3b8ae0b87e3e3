"""All rewrites of a captured step, as alternatives to its program, and the step with the ones that were chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest

from ebbflow.capture.joint import Captured
from ebbflow.cost.attach import is_measured, with_measured_costs
from ebbflow.errors import CaptureError
from ebbflow.planning.alternatives import Alternative
from ebbflow.rewrites.facts import measured
from ebbflow.rewrites.head_costs import estimates, guess_workspace_bytes
from ebbflow.rewrites.head_forms import facts_of, forms_of, rewritten
from ebbflow.rewrites.head_kernels import KEPT, NAMESPACE, SETTLES
from ebbflow.rewrites.heads import Head, find_heads
from ebbflow.step.program import Op, Program
from ebbflow.step.rewrite import Rewrite

__all__ = ["Choice", "alternatives_elsewhere", "alternatives_here", "apply", "choice_of"]


def apply(captured: Captured, rewrites: Sequence[Rewrite]) -> Captured:
    """``captured`` with all of ``rewrites`` in it."""
    for each in rewrites:
        captured = rewritten(captured, each)
    return captured


@dataclass(frozen=True)
class Choice:
    """A form for every head of a step.

    Attributes:
        source: the step as captured.
        heads: of it.
        rewrites: one for each.
    """

    source: Captured
    heads: tuple[Head, ...]
    rewrites: tuple[Rewrite, ...]

    @cached_property
    def captured(self) -> Captured:
        """The step with the rewrites in it."""
        return apply(self.source, self.rewrites)

    @property
    def _pairs(self) -> Iterator[tuple[Head, Rewrite]]:
        return zip(self.heads, self.rewrites, strict=True)

    def not_held(self, device: str) -> str:
        """The first fact that does not hold on ``device``, or of which nobody knows; empty if all hold."""
        for head, each in self._pairs:
            facts = facts_of(head, each)
            found = measured(facts, device)
            if (missing := next((fact for fact in facts if not found[fact.signature]), None)) is not None:
                return missing.says
        return ""

    def estimated(self, program: Program) -> Program:
        """The program with the costs of ``program``, as captured, where an op is in both, else estimated ones."""
        known = {op.signature: (op.seconds, op.workspace_bytes) for op in program.ops}
        seconds = {op.name: op.seconds for op in program.ops}
        ours = self.captured.program
        costs = [known.get(op.signature) or self._estimate(op, seconds) for op in ours.ops]
        return ours.with_costs([each for each, _ in costs], [each for _, each in costs])

    def _estimate(self, op: Op, seconds: Mapping[str, float]) -> tuple[float, int]:
        """The most that the op takes of any head: they are of one size but in odd models."""
        if not op.target.startswith(NAMESPACE):
            return 0.0, 0
        kind = op.target.removeprefix(f"{NAMESPACE}.").partition(".")[0]
        found = [estimates(head, each, seconds)[kind] for head, each in self._pairs]
        return max(each.seconds for each in found), max(each.workspace_bytes for each in found)

    def costed(self, device: str, program: Program) -> Program | None:
        """The program with costs as measured on ``device``; ``None`` if not all facts are known to hold there.

        Args:
            device: ``"cpu"`` or ``"cuda"``.
            program: as captured, with costs, from which those of ops are estimated that had no room to be measured.
        """
        if self.not_held(device):
            return None
        try:
            measured = with_measured_costs(self.captured.program, self.captured.calls, device)
        except CaptureError:  # a profiler runs, ours or somebody's: what is new cannot be measured now
            return None
        # When costs are measured a guess is right: there has to be room for one that is not.
        needs = max(guess_workspace_bytes(head, each) for head, each in self._pairs)
        ops: list[Op] = []
        for op, call, estimate in zip(measured.ops, self.captured.calls, self.estimated(program).ops, strict=True):
            if op.target == SETTLES:
                ops.append(replace(op, workspace_bytes=max(op.workspace_bytes, needs)))
            elif op.target.startswith(NAMESPACE) and not is_measured(call, device):
                ops.append(replace(op, workspace_bytes=estimate.workspace_bytes, seconds=estimate.seconds))
            else:
                ops.append(op)
        return replace(measured, ops=tuple(ops))


def choice_of(captured: Captured, rewrites: Sequence[Rewrite]) -> Choice:
    """The choice that ``rewrites`` are.

    Raises:
        LookupError: if the step has not what they replace.
    """
    by_name = {head.loss.name: head for head in find_heads(captured)[0]}
    for each in rewrites:
        if each.at not in by_name:
            raise LookupError(f"it has no linear layer with a cross-entropy at {each.at}")
    return Choice(captured, tuple(by_name[each.at] for each in rewrites), tuple(rewrites))


def alternatives_here(
    captured: Captured, program: Program, device: str, *, retained: bool = False
) -> list[Alternative]:
    """Alternatives whose costs and facts are measured on ``device`` before they are planned in earnest.

    Args:
        captured: the step.
        program: its program with costs.
        device: ``"cpu"`` or ``"cuda"``.
        retained: whether its backwards retain their graph: then nothing may be written over.
    """
    return [
        Alternative(each.rewrites, each.estimated(program), partial(each.costed, device, program))
        for each in _choices(captured)
        if not (retained and any(rewrite.form == KEPT for rewrite in each.rewrites))
    ]


def alternatives_elsewhere(captured: Captured, program: Program) -> list[Alternative]:
    """Alternatives for a machine that is not at hand: costs are estimates and facts are assumed."""
    return [
        Alternative(each.rewrites, each.estimated(program), partial(each.estimated, program))
        for each in _choices(captured)
    ]


def _choices(captured: Captured) -> Iterator[Choice]:
    heads, _ = find_heads(captured)
    if not heads:
        return
    seen: set[tuple[Rewrite, ...]] = set()
    for rewrites in zip_longest(*(forms_of(head) for head in heads)):
        if None not in rewrites and rewrites not in seen:
            seen.add(rewrites)
            yield Choice(captured, tuple(heads), rewrites)

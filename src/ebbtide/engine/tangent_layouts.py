"""Gradients that arrive at a step's outputs in another memory layout than its graph was traced with.

Kernels add in the order of memory, and a backward copies what does not lie as it needs it. So how an output's gradient
lies in memory is part of the step: other layouts, other last bits.

1. A backward gets these gradients as they arrive. Where their *layouts* are others than traced, the step is traced
   again, from Dynamo's graph.
2. If that has the same ops, its code is right for these too. Single numbers that are expanded (the gradient of a sum or
   a mean) take no more than was planned for, and no other plan is needed.
3. If it has others, they are in the backward alone. That is lowered for the same schedule, with what is new run where
   it is first read, and ends the step that is pending, whose forward is the same code: that is checked.
4. From the next step on, the step as it is traced for these layouts is planned for.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.capture.layouts import Layouts, layouts_of
from ebbtide.cost.profiling_budget import ProfilingBudget, profiling_within
from ebbtide.engine.gradient_watcher import own_backwards
from ebbtide.engine.snapshot import snapshot
from ebbtide.engine.step_code import callables_of
from ebbtide.errors import EbbtideError, InternalError
from ebbtide.faults import users_level
from ebbtide.lower.fingerprints import Fingerprints, with_fingerprints
from ebbtide.lower.lowering import Lowered, lower
from ebbtide.lower.proof import prove
from ebbtide.report.plan import Plan
from ebbtide.signals import raised_by_a_handler
from ebbtide.step.legality import check
from ebbtide.step.program import Program
from ebbtide.step.schedule import Boundary, Compute, Offload, Reload, Schedule

__all__ = ["Relaid", "TangentLayouts"]

Backward = Callable[[list[Any]], Any]


class Relaid:
    """What a step that is pending needs for gradients in other layouts.

    Args:
        lowered: whose backward ends it; ``None`` where its own code does.
        exact: whether the bits are those that eager has.
        planned: whether the plan is for these layouts too.
    """

    def __init__(self, lowered: Lowered | None = None, *, exact: bool = True, planned: bool = False) -> None:
        self.exact = exact
        self.planned = planned
        self._lowered = lowered
        self._plain: Backward | None = None

    def backward(self, fingerprints: Fingerprints | None) -> Backward | None:
        """What ends the step; ``None`` for its own code.

        Args:
            fingerprints: of what its forward made, to hold against what is made again; ``None`` to trust that.
        """
        if self._lowered is None:
            return None
        if fingerprints is not None:
            graphs = with_fingerprints(self._lowered.forward, self._lowered.backward, fingerprints)
            return callables_of(*graphs).backward
        if self._plain is None:
            self._plain = callables_of(self._lowered.forward, self._lowered.backward).backward
        return self._plain


@dataclass(frozen=True, kw_only=True, eq=False)
class TangentLayouts:
    """In which layouts gradients of the outputs of one step's code are expected, and what others ask for.

    Attributes:
        first: these gradients, as the step was captured; layouts are told by how they differ from those.
        device: ``"cpu"`` or ``"cuda"``.
        captured: the step that the code is of, with the rewrites and updates of its plan.
        plan: of the code.
        traced_again: that step as it is traced for layouts.
        learn: is told for which layouts the next step is to be planned.
    """

    first: tuple[torch.Tensor, ...]
    device: str
    captured: Captured
    plan: Plan
    traced_again: Callable[[Layouts], Captured]
    learn: Callable[[Layouts], None]
    _known: dict[Layouts, Relaid] = field(default_factory=dict["Layouts", Relaid], repr=False)

    @functools.cached_property
    def _traced(self) -> tuple[torch.Tensor, ...]:
        """These gradients, as the code was traced for them."""
        return tuple(node.meta["val"] for node in self.captured.tangents)

    @functools.cached_property
    def _strides(self) -> list[tuple[int, ...]]:
        return [each.stride() for each in self._traced]

    def relaid(self, arguments: list[Any]) -> Relaid | None:
        """What gradients ask for that arrive in other layouts than those of the code; ``None`` if they do not.

        Where the bits cannot be eager's, these gradients are laid out as traced, and that is said.

        Args:
            arguments: of the backward, these gradients last.
        """
        begin = len(arguments) - len(self._strides)
        if [each.stride() for each in arguments[begin:]] == self._strides:
            return None
        if not any(layouts_of(arguments[begin:], self._traced)):
            return None
        layouts = layouts_of(arguments[begin:], self.first)
        if layouts not in self._known:
            self._known[layouts] = self._find(layouts, [each for each in arguments if isinstance(each, torch.Tensor)])
        found = self._known[layouts]
        if not found.planned:
            self.learn(layouts)
        if not found.exact:
            arguments[begin:] = map(_copy, arguments[begin:], self._traced)
        return found

    def _find(self, layouts: Layouts, lenders: list[torch.Tensor]) -> Relaid:
        room = self.plan.budget_bytes - self.plan.resident_bytes - self.plan.reserve_bytes - self.plan.boundary_bytes
        budget, put_back = ProfilingBudget(max(0, room), lenders), snapshot((), self.device)
        try:
            with own_backwards(), profiling_within(budget):
                again = self.traced_again(layouts)
            if not (budget.untried or budget.unknown_facts):
                if _same_ops(self.captured.graph, again.graph):
                    return Relaid(planned=all(map(_is_expanded, self.first, layouts)))
                return Relaid(self._ending(again))
            for_good = False
        except EbbtideError:  # the step that is captured next says what is wrong, or goes on without rewrites
            for_good = False
        except Exception as error:
            if raised_by_a_handler(error):
                raise
            for_good = True
        finally:
            put_back()
        warnings.warn(
            "gradients of what the model returned arrive in another memory layout than its step was traced with: the "
            f"gradients of {'such steps' if for_good else 'this step'} may differ from eager's in their last bits"
            f"{'' if for_good else '. The next one is planned for it'}",
            stacklevel=users_level(),
        )
        return Relaid(exact=False, planned=for_good)

    def _ending(self, again: Captured) -> Lowered:
        """What ends a step that is pending as ``again`` ends (definition 3).

        Raises:
            InternalError: if their forwards are not the same code.
        """
        schedule = _carried_over(self.captured.program, self.plan.schedule, again.program)
        if wrong := check(again.program, schedule):
            raise InternalError(f"a schedule could not be carried over: {wrong[0]}")
        links = None if self.plan.machine is None else self.plan.machine.links
        begun, lowered = lower(self.captured, self.plan.schedule, links), lower(again, schedule, links)
        if (begun.forward.code, begun.slots) != (lowered.forward.code, lowered.slots):
            raise InternalError("the forward of a step depends on how gradients of its outputs lie in memory")
        prove(again, lowered)
        return lowered


def _is_expanded(traced: torch.Tensor, strides: tuple[int, ...] | None) -> bool:
    """Whether a gradient lies as traced, or takes less memory since some of its elements are one."""
    return strides is None or any(size > 1 and step == 0 for size, step in zip(traced.shape, strides, strict=True))


def _copy(gradient: torch.Tensor, traced: torch.Tensor) -> torch.Tensor:
    """``gradient`` in the layout that was traced."""
    return gradient.new_empty_strided(traced.shape, traced.stride()).copy_(gradient)


def _same_ops(graph: fx.Graph, other: fx.Graph) -> bool:
    """Whether two graphs make the same calls on the same nodes."""
    return _calls(graph) == _calls(other)


def _calls(graph: fx.Graph) -> list[object]:
    places = {node: index for index, node in enumerate(graph.nodes)}

    def place(node: fx.Node) -> Any:
        return _Place(places[node])

    return [(node.op, node.target, *fx.map_arg((node.args, dict(node.kwargs)), place)) for node in graph.nodes]


@dataclass(frozen=True)
class _Place:
    """Where an argument is made."""

    index: int


def _carried_over(program: Program, schedule: Schedule, other: Program) -> Schedule:
    """``schedule``, of ``program``, for ``other``, which has a few ops more or less.

    What only that has runs where it is first read.
    """
    of_op, of_buffer = _matched(program, other)
    new = set(range(len(other.ops))) - set(of_op.values())
    steps: list[Compute | Boundary | Offload | Reload] = []

    def run(op: int) -> None:
        for buffer in other.ops[op].inputs:
            producer = other.buffers[buffer].producer
            if producer in new:
                new.discard(producer)
                run(producer)
        steps.append(Compute(op))

    for action in schedule.actions:
        match action:
            case Compute(op):
                if op in of_op:
                    run(of_op[op])
            case Offload(buffer, tier):
                steps.append(Offload(of_buffer[buffer], tier))
            case Reload(buffer):
                steps.append(Reload(of_buffer[buffer]))
            case Boundary():
                steps.append(action)
            case _:
                pass
    for op in sorted(new):  # read by nothing but the outputs
        run(op)
    return Schedule.from_steps(other, steps)


def _matched(program: Program, other: Program) -> tuple[dict[int, int], dict[int, int]]:
    """Which op of ``other`` is which of ``program``, and which buffer which, both by their order."""
    names, others = ([op.target for op in each.ops] for each in (program, other))
    alike = 0  # from the front: a forward is most of it
    while alike < min(len(names), len(others)) and names[alike] == others[alike]:
        alike += 1
    of_op = {op: op for op in range(alike)}
    for block in SequenceMatcher(None, names[alike:], others[alike:], autojunk=False).get_matching_blocks():
        of_op |= {alike + block.a + i: alike + block.b + i for i in range(block.size)}
    of_buffer = {b: b for b, buffer in enumerate(program.buffers) if buffer.producer is None}
    for op, twin in of_op.items():
        of_buffer |= dict(zip(program.ops[op].outputs, other.ops[twin].outputs, strict=False))
    return of_op, of_buffer

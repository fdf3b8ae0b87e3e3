"""The generated code of one schedule of a captured step: its two callables, and what is needed to run them.

It is made once, proven statically to be the program (``lower.proof``), and shared by all plans with that schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.capture.output_links import Links, links_of
from ebbtide.capture.uses import uses_by
from ebbtide.engine.hook_order import gradient_order
from ebbtide.engine.partial_backward import PartialBackwards
from ebbtide.engine.unused import UnusedOutputs
from ebbtide.lower.lowering import Lowered, lower
from ebbtide.lower.proof import prove
from ebbtide.optimizer.in_step.updates import updates_in
from ebbtide.report.plan import Plan
from ebbtide.step.schedule import Schedule
from ebbtide.torch_seams.direct_calls import boxed_callable
from ebbtide.transfers.arena import Arena
from ebbtide.transfers.paths import TransferPath
from ebbtide.transfers.slots import Slot

__all__ = ["Callables", "StepCode", "callables_of", "code_of", "lowered_and_proven"]


@dataclass(frozen=True, slots=True)
class Callables:
    """Forward and backward as they run: each takes one list of arguments and empties it."""

    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCode:
    """The code of one step under one schedule, without the graphs that it was generated from.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        plain: the generated code alone.
        output_count: how many of the forward's results are the step's own; the rest is saved.
        gradient_order: per tensor that goes in, when its gradient reaches it (``hook_order``).
        sums: per primal that is read several times, so that its gradient is a sum, its place among the tensors that go
            in.
        partial: backwards for some of its gradients.
        unused: drops gradients that no used output depends on.
        links: between outputs of its forward.
        handed_out: positions of the primals with a gradient that are no parameters of the model.
        updates: of a step with the optimizer in it, names of the parameters that it updates, by position among the
            primals.
        entries: where these are among the tensors that go in.
        default_dtype: what its forward runs under, and what runs again in its backward: an integer divided by a number
            has it, and so has what is made without a type of its own.
        tangents: as the capture saw them.
        slots: of the buffers that it moves to other tiers.
        tiers: by name, those that there are.
    """

    device: str
    plain: Callables
    output_count: int
    gradient_order: tuple[int, ...]
    sums: Mapping[int, int]
    partial: PartialBackwards
    unused: UnusedOutputs
    links: Links
    handed_out: tuple[int, ...]
    updates: Mapping[int, str]
    entries: Mapping[int, int]
    default_dtype: torch.dtype
    tangents: tuple[Any, ...] = field(repr=False)
    slots: tuple[Slot, ...] = field(repr=False)
    tiers: Mapping[str, TransferPath] = field(repr=False)

    @property
    def moves(self) -> bool:
        """Whether it moves buffers to other tiers."""
        return bool(self.slots)

    def arena(self, number: int, timed: bool = False) -> Arena | None:
        """An arena for a pending step that is about to start, if it needs one; ``timed`` if it is measured.

        Raises:
            TierError: if a tier has no room; nothing of the step has run.
        """
        return Arena(self.slots, self.tiers, number, timed) if self.slots else None

    def rehearsal_tangents(self) -> list[torch.Tensor]:
        """Tangents as of a loss that ``backward()`` is called on: ones."""
        return [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device).fill_(1)
            for each in self.tangents
        ]


def lowered_and_proven(captured: Captured, plan: Plan) -> Lowered:
    """The two graphs of ``plan`` for ``captured``.

    Raises:
        ProofError: if a node of the graphs is none of the captured step's, or one of these is missing.
    """
    lowered = lower(captured, plan.schedule, None if plan.machine is None else plan.machine.links)
    prove(captured, lowered)
    return lowered


def code_of(
    captured: Captured, lowered: Lowered, schedule: Schedule, *, device: str, tiers: Mapping[str, TransferPath]
) -> StepCode:
    """The code of ``captured``, ``lowered`` for ``schedule``; nothing can be changed in the graphs from here on."""
    updates = {each.position: each.parameter for each in updates_in(captured).values()}
    tensors = [i for i, node in enumerate(captured.primals) if isinstance(node.meta.get("val"), torch.Tensor)]
    return StepCode(
        device=device,
        plain=callables_of(lowered.forward, lowered.backward),
        output_count=captured.forward_output_count,
        gradient_order=gradient_order(captured),
        sums={i: tensors.index(i) for i in _sums(captured)} if not updates else {},
        partial=PartialBackwards(captured, schedule, tensors),
        unused=UnusedOutputs(captured),
        links=links_of(captured),
        handed_out=tuple(_handed_out(captured)),
        updates=updates,
        entries={position: tensors.index(position) for position in updates},
        default_dtype=torch.get_default_dtype(),
        tangents=tuple(node.meta["val"] for node in captured.tangents),
        slots=lowered.slots,
        tiers=tiers,
    )


def _sums(captured: Captured) -> Iterator[int]:
    """Positions of primals that the forward reads several times, so that their gradients are sums."""
    backward = set[fx.Node](captured.tangents)
    for node in captured.graph.nodes:
        if not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    for position, gradient in enumerate(captured.outputs[captured.forward_output_count :]):
        if isinstance(gradient, fx.Node) and gradient.target is torch.ops.aten.add.Tensor:
            primal = captured.primals[position]
            if sum(uses_by(user, primal) for user in primal.users if user not in backward) > 1:
                yield position


def _handed_out(captured: Captured) -> Iterator[int]:
    """Positions of the primals with a gradient that are no parameters of the model."""
    for position, gradient in enumerate(captured.outputs[captured.forward_output_count :]):
        if isinstance(gradient, fx.Node) and not any(captured.parameters[position : position + 1]):
            yield position


def callables_of(forward: fx.GraphModule, backward: fx.GraphModule) -> Callables:
    """The graphs' generated code, which takes its arguments as one list and empties it: no frame keeps them."""
    return Callables(boxed_callable(forward), boxed_callable(backward))

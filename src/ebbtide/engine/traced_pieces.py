"""The parts of a step in pieces: graphs, their runs, and the orders in which they have run.

1. A *piece* is a traced graph with its plans (``step``), at some sizes; an *occurrence* is one run of it in a step, a
   *gap* the code between two, which runs as in eager.
2. An *order* is that in which the pieces of a call's key have run, with what its gaps took and the plan of all.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.capture.symbolic.sizes import size_inputs
from ebbtide.cost.attach import with_measured_costs
from ebbtide.engine.compiled import Call, Capture
from ebbtide.engine.executable import Executable
from ebbtide.engine.pending_steps import PendingStep
from ebbtide.engine.step import Step
from ebbtide.engine.traced_graph import TracedGraph
from ebbtide.errors import CaptureError
from ebbtide.measurement.cpu_allocations import profiler_active
from ebbtide.measurement.step_record import Taken
from ebbtide.report.plan import Plan
from ebbtide.step.program import Program
from ebbtide.torch_seams.aot import boxed
from ebbtide.torch_seams.direct_calls import boxed_callable
from ebbtide.torch_seams.storages import StorageWatch

__all__ = ["Order", "PieceGraph", "RanPiece", "RunningCall", "SizedPiece", "here", "leaves_bytes"]

_MOST_SIZES = 64
"""Of one graph, at which it is kept."""


class RunningCall(Protocol):
    """A call that runs, as its graphs see it."""

    def forward(self, graph: PieceGraph, args: list[Any]) -> Any:
        """The next occurrence, of ``graph``."""
        ...

    def gave(self, results: Sequence[object], inputs: Sequence[object]) -> None:
        """The forward that ran last has given ``results`` for ``inputs``."""
        ...


class _Here(threading.local):
    run: RunningCall | None = None


here = _Here()
"""The call that this thread is in."""


class PieceGraph(TracedGraph):
    """A graph that Dynamo's breaks leave; runs are told of its forwards."""

    def __init__(self, *, device: str, name: str, verify: Any) -> None:
        super().__init__(device=device, name=name)
        self._verify = verify
        self.pieces: OrderedDict[tuple[int, ...], SizedPiece] = OrderedDict()

    def take_inputs(self, inputs: Sequence[object]) -> None:
        """Note which are leaves; the rest is seen at its first run."""
        leaves = (i for i, each in enumerate(inputs) if isinstance(each, torch.Tensor) and each.is_leaf)
        self._leaves = frozenset(leaves)

    def take_results(self, results: Sequence[object], inputs: Sequence[object]) -> None:
        """The node of the forward that has just run is in the graph of what it gave, or has changed."""
        if here.run is not None:
            here.run.gave(results, inputs)

    def partition(self, joint: fx.GraphModule, forward_output_count: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Keep the joint graph, whose sizes may be symbols.

        Raises:
            CaptureError: if a fraction is one, with which tensors are computed.
            NotAtTheseSizes: if it cannot be written out at the sizes that it was traced with.
        """
        if any(isinstance(each.meta.get("val"), torch.SymFloat) for each in joint.graph.nodes):
            raise CaptureError("a number that changes from step to step is computed with")
        sizes = size_inputs(joint.graph)
        self.symbolic = bool(sizes)
        graphs = super().partition(joint, forward_output_count)
        if sizes:
            values = (each.meta.get("val") for each in joint.graph.find_nodes(op="placeholder"))
            self.at([each.node.hint if isinstance(each, torch.SymInt) else None for each in values])
        return graphs

    def forward_callable(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Runs the next occurrence of the call that this thread is in."""

        def forward(args: list[Any]) -> Any:
            run = here.run
            assert run is not None, "a piece of a step was called from elsewhere"
            return run.forward(self, args)

        return boxed(forward)

    def nothing_to_train(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Runs as it is."""
        return boxed(boxed_callable(graph))

    def piece(self, args: Sequence[Any], call: Call) -> SizedPiece:
        """At the sizes among ``args``."""
        sizes = tuple(each for each in args if isinstance(each, int)) if self.symbolic else ()
        if sizes not in self.pieces:
            step = Step(cast(Capture, self), verify=self._verify)  # plans and lowering ask no more of it
            step.piece.captured = self.at(args)
            step.piece.see_inputs(args, call, whole=False)
            self.pieces[sizes] = SizedPiece(self, step)
            if len(self.pieces) > _MOST_SIZES:
                self.pieces.popitem(last=False)
        self.pieces.move_to_end(sizes)
        return self.pieces[sizes]


class SizedPiece:
    """A graph at some sizes (definition 1).

    Args:
        graph: it.
        step: with its plans.
    """

    def __init__(self, graph: PieceGraph, step: Step) -> None:
        self.graph = graph
        self.step = step
        self.least_kept: Executable | None = None
        self._program: Program | None = None

    @property
    def captured(self) -> Captured:
        """The graph as a value."""
        found = self.step.piece.captured
        assert found is not None
        return found

    @property
    def may_be_timed(self) -> bool:
        """Whether its ops are, or can be: not while somebody's profiler runs."""
        return self._program is not None or not profiler_active()

    @property
    def program(self) -> Program:
        """Of the graph, with costs."""
        if self._program is None:
            self._program = with_measured_costs(self.captured.program, self.captured.calls, self.graph.device)
        return self._program


@dataclass(eq=False)
class RanPiece:
    """One run of a piece (definition 1).

    Attributes:
        piece: that runs.
        pending: its forward and backward.
        sources: per primal the earlier occurrence and output that gave it; ``None`` for others.
        through: primals that take a gradient and come out of the gap before, with their bytes.
        shared: likewise, out of a gap before an earlier occurrence, which has read it: that one, and its primal.
        outputs: watches the outputs, without new values of inputs.
        used: of these, those that a later occurrence has read.
        died: outputs of earlier ones that nobody has any more, since the one before.
    """

    piece: SizedPiece
    pending: PendingStep
    sources: tuple[tuple[int, int] | None, ...]
    through: dict[int, int]
    shared: dict[int, tuple[int, int]]
    outputs: list[StorageWatch | None] = field(default_factory=list[StorageWatch | None])
    used: set[int] = field(default_factory=set[int])
    died: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


@dataclass(eq=False)
class Order:
    """What is known of the calls of one key (definition 2).

    Attributes:
        occurrences: as they ran last.
        taken: what each part of a recorded step took; empty before there is one.
        silent: occurrences whose backward has not come in it, since nothing of the loss hangs on them: parts of gaps.
        plan: of the stitched program; ``None`` before it is planned.
        executables: of the plan, per occurrence.
        planned: whose they are.
        request: the number of what was asked for when it was planned.
        steps: how many there were.
        due: the next that is recorded.
        kept_bytes: by its occurrences for their backwards.
        aside_bytes: left free, since a step has taken more than its plan predicted.
        above_bytes: as measured last.
    """

    occurrences: list[RanPiece] = field(default_factory=list[RanPiece])
    taken: tuple[Taken, ...] = ()
    silent: frozenset[int] = frozenset()
    plan: Plan | None = None
    executables: list[Executable] = field(default_factory=list[Executable])
    planned: list[SizedPiece] = field(default_factory=list[SizedPiece])
    request: int = -1
    steps: int = 0
    due: int = 2
    kept_bytes: int = 0
    aside_bytes: int = 0
    above_bytes: int | None = None

    @property
    def graphs(self) -> list[PieceGraph]:
        """Of its occurrences."""
        return [each.piece.graph for each in self.occurrences]

    @property
    def trains(self) -> list[int]:
        """Its occurrences whose backwards come."""
        return [index for index in range(len(self.occurrences)) if index not in self.silent]

    @property
    def proven(self) -> list[Executable]:
        """Its executables that are, once they have run."""
        return [self.executables[index] for index in self.trains] if self.executables else []

    def forward_gap(self, index: int) -> Taken:
        """What the code before an occurrence took, with what is silent; the last is the window between the graphs."""
        begin = max((each + 1 for each in self.trains if each < index), default=0)
        return Taken.joined(self.taken[2 * begin : 2 * index + 1])

    def backward_gap(self, index: int) -> Taken:
        """What the code took that runs in the backward after that of an occurrence."""
        later = sum(each > index for each in self.trains)
        return self.taken[2 * len(self.occurrences) + 2 * later + 2]


def leaves_bytes(occurrence: RanPiece) -> int:
    """What its forward keeps for its backward; 0 once that has run."""
    executable = occurrence.pending.executable
    return 0 if executable is None else executable.leaves_bytes

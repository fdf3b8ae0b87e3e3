"""One call that runs in pieces: which plan each comes under, who gives to whom, and when its gaps begin and end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.engine.call_context import CallContext
from ebbtide.engine.calls import Calls
from ebbtide.engine.compiled import Call
from ebbtide.engine.configuration import Configuration, Request
from ebbtide.engine.executable import Executable
from ebbtide.engine.executor import choose_checks, run_forward, running_as
from ebbtide.engine.optimizer_link import OptimizerLink
from ebbtide.engine.pending_steps import Holdings, Meets, Overlap, PendingStep, PendingSteps
from ebbtide.engine.traced_pieces import Order, PieceGraph, RanPiece, SizedPiece, leaves_bytes
from ebbtide.measurement.step_record import Before, MarkedRecord
from ebbtide.torch_seams.aot import mutated_inputs
from ebbtide.torch_seams.storages import StorageWatch

__all__ = ["Model", "RunInPieces"]


class Model(Protocol):
    """What of a fitted model is needed (``model``)."""

    plain_class: type[torch.nn.Module]
    configuration: Configuration
    request: Request
    optimizers: OptimizerLink
    calls: Calls
    pending: PendingSteps


class Host(Protocol):
    """What of the steps of one model a call needs (``in_pieces``)."""

    model: Model

    def aside(self, device: str) -> AbstractContextManager[None]:
        """Open around what is found out while a call runs."""
        ...

    def restore(self) -> None:
        """Put back what the step has changed before a proof failed."""
        ...

    def at_least_kept(self, piece: SizedPiece) -> Executable:
        """``piece`` under the plan that keeps least for its backward."""
        ...

    def within(self, piece: SizedPiece, executable: Executable, held: int) -> Executable:
        """``executable``, or one that takes less where it does not fit."""
        ...

    def resized(self, piece: SizedPiece, executable: Executable) -> Executable | None:
        """The schedule of a plan for ``piece``, the same graph at other sizes; ``None`` if it does not do."""
        ...


class RunInPieces:
    """One call."""

    def __init__(
        self,
        host: Host,
        expected: Order,
        orders: Sequence[Order],
        call: Call,
        now: CallContext,
        resident: int,
    ) -> None:
        self.host, self.expected, self.order, self.now = host, expected, expected, now
        self._resident = resident
        self._orders = orders
        self.call: Call | None = call
        """While its forward runs; it holds a batch."""
        self.occurrences: list[RanPiece] = []
        self.record: MarkedRecord | None = None
        self.backwards: list[int] = []
        self.as_planned = self.same_sizes = self.same_way = True
        self._latest: RanPiece | None = None
        self._given: dict[int, tuple[int, int]] = {}
        self._passed: dict[int, tuple[StorageWatch, tuple[int, int]]] = {}  # what has come out of gaps, by storage

    def forward(self, graph: PieceGraph, args: list[Any]) -> Any:
        """The next occurrence, of ``graph``."""
        index = len(self.occurrences)
        piece, executable = self._executable(index, graph, args)
        pending = PendingStep(
            executable,
            self.host.model.pending,
            Overlap(self.now.call_slot),
            Holdings(self.host),
            Meets(self.host.model.optimizers.in_backward),
            self.now.hooked,
        )
        choose_checks(pending, self.now.device)
        pending.measuring.gauge = None  # its window would span the others
        if pending.proves:
            pending.measuring.restore = self.host.restore
        sources, through, shared = self._sources(piece.captured, args)
        self._latest = occurrence = RanPiece(piece, pending, sources, through, shared)
        occurrence.died = [*self._dead()]
        self.occurrences.append(occurrence)
        if self.record is not None:
            self.record.mark()
            pending.measuring.record = HalfRecord(self, index)
        with running_as(pending):
            results = run_forward(args)
        if self.record is not None:
            self.record.mark()
        self._see_outputs(index, occurrence, results)
        piece.step.ran(executable)
        return results

    def _executable(self, index: int, graph: PieceGraph, args: list[Any]) -> tuple[SizedPiece, Executable]:
        known = self._way(index, graph)
        planned = self.as_planned and known.plan is not None
        if self.record is not None and not graph.pieces:
            self.record.end()  # ops that are new are timed, which no profiler may see
            self.record = None
        with self.host.aside(self.now.device):
            assert self.call is not None
            piece = graph.piece(args, self.call)
            if planned and known.planned[index] is piece:
                return piece, known.executables[index]
            if planned:
                self.same_sizes = False
                if (found := self.host.resized(piece, known.executables[index])) is not None:
                    return piece, found
            held = self._resident + sum(map(leaves_bytes, self.occurrences))
            return piece, self.host.within(piece, self.host.at_least_kept(piece), held)

    def _way(self, index: int, graph: PieceGraph) -> Order:
        """What is known of steps that have come to ``graph`` as this one has, if anything is."""
        if self.as_planned and self.order.graphs[index : index + 1] != [graph]:
            so_far = [*(each.piece.graph for each in self.occurrences), graph]
            others = (each for each in reversed(self._orders) if each.graphs[: index + 1] == so_far)
            other = next(others, None)
            self.as_planned, self.same_way = other is not None, False
            self.order = self.order if other is None else other
        return self.order

    def _sources(
        self, captured: Captured, args: list[Any]
    ) -> tuple[tuple[tuple[int, int] | None, ...], dict[int, int], dict[int, tuple[int, int]]]:
        """Where primals are from, and those that take a gradient and come out of a gap."""
        sources: list[tuple[int, int] | None] = []
        through: dict[int, int] = {}
        shared: dict[int, tuple[int, int]] = {}
        gradients = captured.outputs[captured.forward_output_count :]
        for position, value in enumerate(args):
            if not isinstance(value, torch.Tensor):
                sources.append(None)
                continue
            watch = StorageWatch(value)
            found = self._given.get(watch.key)
            sources.append(found)
            own = bool(captured.parameters[position])
            if found is not None or own or not isinstance(gradients[position], fx.Node) or not self.occurrences:
                continue
            if watch.key in self._passed:
                shared[position] = self._passed[watch.key][1]
            else:
                through[position] = value.nbytes
                self._passed[watch.key] = watch, (len(self.occurrences), position)
        for each in sources:
            if each is not None:
                self.occurrences[each[0]].used.add(each[1])
        return tuple(sources), through, shared

    def _dead(self) -> Iterator[tuple[int, int]]:
        """Outputs that no later occurrence has read and that are gone, each once."""
        for giver, each in enumerate(self.occurrences):
            for output, watch in enumerate(each.outputs):
                if watch is not None and output not in each.used and not watch.alive:
                    each.outputs[output] = None
                    yield giver, output

    def _see_outputs(self, index: int, occurrence: RanPiece, results: Sequence[Any]) -> None:
        captured = occurrence.piece.captured
        changed = mutated_inputs(captured.graph, captured.forward_output_count)
        inputs = {key for key, (giver, _) in self._given.items() if giver < index}
        for position, value in enumerate(results[: captured.forward_output_count]):
            if position in changed:
                continue
            watch = StorageWatch(value) if isinstance(value, torch.Tensor) else None
            if watch is not None and watch.key not in inputs:
                self._given[watch.key] = (index, len(occurrence.outputs))
            occurrence.outputs.append(watch)

    def gave(self, results: Sequence[object], inputs: Sequence[object]) -> None:
        """The forward that ran last has given ``results`` for ``inputs``."""
        latest, self._latest = self._latest, None
        if latest is not None:
            captured = latest.piece.captured
            changed = [value for node, value in zip(captured.primals, inputs, strict=False) if node in captured.mutated]
            latest.pending.register([results, changed])

    def abandon(self) -> None:
        """The call has raised."""
        for each in self.occurrences:
            each.pending.abandon()


class HalfRecord:
    """Tells a step's record of one occurrence's backward; takes the place of a record of its own."""

    def __init__(self, run: RunInPieces, index: int) -> None:
        self._run, self._index = run, index

    def begin(self) -> None:
        """The forward's mark is made by the run."""

    def forward_returned(self) -> None:
        """Likewise."""

    def backward_begins(self, *, retains: bool) -> None:
        """The backward of the occurrence starts."""
        self._run.backwards.append(self._index)
        if self._run.record is not None:
            self._run.record.backward_begins(retains=retains)

    def backward_returned(self) -> None:
        """It has returned."""
        if self._run.record is not None:
            self._run.record.backward_returned()

    def end(self) -> None:
        """It is given up."""

    def end_for(self, number: int) -> Before:
        """Nothing is known of its blocks."""
        return Before(number)

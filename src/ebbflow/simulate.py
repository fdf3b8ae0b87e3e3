"""What a schedule does on a machine: the one judge of bytes and seconds that every planner and report uses.

Bytes are a function of the schedule alone, never of seconds (a wrong time estimate costs time, never memory):
1. ``Compute`` allocates workspace and all outputs while its inputs live. When it ends, the workspace goes, and
   so do outputs that were resident already or that nobody reads before they are made again. A rerun makes all
   outputs but those that are made once.
2. A random op that runs more than once keeps its generator state from just before its first run until its last
   run ends, and each repeat takes the size of the state once more (to put the generator back).
3. At ``Boundary`` mutations go, user code reaches its peak, and the tangents and what user code holds appear;
   these stay.
4. ``Offload`` takes bytes in its tier at once and none on the device; ``Free`` gives the device bytes back;
   ``Reload`` allocates on the device at its own position and gives the tier's bytes back when it is issued.

Time runs on lanes (compute, and one out and one in per tier). An action starts when its lane is free and its
data is ready; a ``Free`` after an ``Offload`` makes the compute lane wait for the copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ebbflow.machine import Machine
from ebbflow.program import Program
from ebbflow.schedule import Boundary, Compute, Free, Offload, Reload, Schedule, kept_outputs

__all__ = ["Timeline", "overhead_of", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """Bytes after every action, and when every action starts and ends.

    Attributes:
        live_bytes: shape ``(actions,)``: device bytes above the step's start after each action.
        peak_bytes: shape ``(actions,)``: the most during each action.
        tier_bytes: per tier, shape ``(actions,)``: bytes in the tier after each action.
        start_seconds: shape ``(actions,)``: start of each action on its lane.
        end_seconds: shape ``(actions,)``: its end.
        runs: shape ``(ops,)``: how often each op ran.
    """

    live_bytes: NDArray[np.int64]
    peak_bytes: NDArray[np.int64]
    start_seconds: NDArray[np.float64]
    end_seconds: NDArray[np.float64]
    runs: NDArray[np.int64]
    tier_bytes: dict[str, NDArray[np.int64]] = field(default_factory=dict[str, NDArray[np.int64]])

    @property
    def above_bytes(self) -> int:
        """The peak above the level at the step's start, bytes."""
        return int(self.peak_bytes.max(initial=0))

    @property
    def peak_action(self) -> int:
        """Index of the first action at which the peak is reached."""
        return int(self.peak_bytes.argmax()) if len(self.peak_bytes) else 0

    @property
    def seconds(self) -> float:
        """When the last action ends."""
        return float(self.end_seconds.max(initial=0.0))


def simulate(program: Program, schedule: Schedule, machine: Machine | None = None) -> Timeline:
    """The timeline of ``schedule``, which must be legal (``legality.check`` tells) apart from its budget.

    Args:
        program: what is run, with its seconds and workspaces.
        schedule: the actions.
        machine: needed only where the schedule moves buffers; its links give the seconds of transfers.

    Raises:
        KeyError: if the schedule moves a buffer to a tier to which ``machine`` has no link.
    """
    bytes_simulation = _Bytes(program, schedule)
    clock = _Clock(program, machine)
    count = len(schedule.actions)
    live = np.zeros(count, np.int64)
    peak = np.zeros(count, np.int64)
    start = np.zeros(count, np.float64)
    end = np.zeros(count, np.float64)
    tiers: dict[str, NDArray[np.int64]] = {
        tier: np.zeros(count, np.int64) for tier in sorted(a.tier for a in schedule.actions if isinstance(a, Offload))
    }
    for index, action in enumerate(schedule.actions):
        match action:
            case Compute(op):
                peak[index] = bytes_simulation.compute(index, op)
                start[index], end[index] = clock.compute(op)
            case Free(buffer):
                bytes_simulation.free(buffer)
                start[index] = end[index] = clock.free(buffer)
            case Boundary():
                peak[index] = bytes_simulation.boundary()
                start[index] = end[index] = clock.now
            case Offload(buffer, tier):
                bytes_simulation.offload(buffer, tier)
                start[index], end[index] = clock.offload(buffer, tier)
            case Reload(buffer):
                bytes_simulation.reload(buffer)
                start[index], end[index] = clock.reload(buffer)
        live[index] = bytes_simulation.live
        peak[index] = max(peak[index], bytes_simulation.live)
        for tier, row in tiers.items():
            row[index] = bytes_simulation.tiers.get(tier, 0)
    return Timeline(live, peak, start, end, bytes_simulation.runs, tiers)


def overhead_of(program: Program, schedule: Schedule) -> float:
    """The time that a schedule without transfers adds, as a share of the unplanned step: that of its reruns."""
    computes = sum(program.ops[op].seconds for op in schedule.computes if op is not None)
    return computes / program.seconds - 1.0 if program.seconds else 0.0


class _Bytes:
    """The byte half: clauses 1-4 of the module."""

    def __init__(self, program: Program, schedule: Schedule) -> None:
        self.program = program
        self.live = 0
        self.tiers: dict[str, int] = {}
        self.runs = np.zeros(len(program.ops), np.int64)
        self._resident = [False] * len(program.buffers)
        self._tier_of: dict[int, str] = {}
        self._total_runs = np.zeros(len(program.ops), np.int64)
        self._kept = kept_outputs(program, schedule)
        for op in schedule.computes:
            if op is not None:
                self._total_runs[op] += 1

    def compute(self, index: int, op_index: int) -> int:
        """Run an op; the peak while it runs."""
        op = self.program.ops[op_index]
        buffers = self.program.buffers
        first = self.runs[op_index] == 0
        replayed = op.random and self._total_runs[op_index] > 1
        extra = op.workspace_bytes
        if replayed:
            if first:
                self.live += op.state_bytes
            else:
                extra += op.state_bytes
        self.runs[op_index] += 1
        made = op.outputs if first else self.program.made_by_rerun(op_index)
        peak = self.live + extra + sum(buffers[b].bytes for b in made)
        for b in self._kept[index]:
            if not self._resident[b]:
                self._resident[b] = True
                self.live += buffers[b].bytes
        if replayed and self.runs[op_index] == self._total_runs[op_index]:
            self.live -= op.state_bytes
        return peak

    def free(self, buffer: int) -> None:
        if self._resident[buffer]:
            self._resident[buffer] = False
            self.live -= self.program.buffers[buffer].bytes

    def boundary(self) -> int:
        """Cross it; the peak that user code reaches there."""
        for b in self.program.mutations:
            self.free(b)
        for b in self.program.tangents:
            self._resident[b] = True
        self.live += self.program.late_bytes
        return self.live + self.program.between_excess_bytes

    def offload(self, buffer: int, tier: str) -> None:
        self._tier_of[buffer] = tier
        self.tiers[tier] = self.tiers.get(tier, 0) + self.program.buffers[buffer].bytes

    def reload(self, buffer: int) -> None:
        tier = self._tier_of.pop(buffer)
        self.tiers[tier] -= self.program.buffers[buffer].bytes
        if not self._resident[buffer]:
            self._resident[buffer] = True
            self.live += self.program.buffers[buffer].bytes


class _Clock:
    """The time half: lanes and when data is ready."""

    def __init__(self, program: Program, machine: Machine | None) -> None:
        self.now = 0.0  # when the compute lane is free
        self._program = program
        self._machine = machine
        self._lane: dict[tuple[str, str], float] = {}
        self._ready: dict[int, float] = {}  # buffers whose data arrives later than the compute lane's order says
        self._copied: dict[int, tuple[float, str]] = {}  # end and tier of the last offload

    def compute(self, op_index: int) -> tuple[float, float]:
        op = self._program.ops[op_index]
        begin = max([self.now, *(self._ready.pop(b, 0.0) for b in op.inputs)])
        self.now = begin + op.seconds
        return begin, self.now

    def free(self, buffer: int) -> float:
        if buffer in self._copied:
            self.now = max(self.now, self._copied[buffer][0])
        return self.now

    def offload(self, buffer: int, tier: str) -> tuple[float, float]:
        begin, end = self._transfer(buffer, tier, "out", self.now)
        self._copied[buffer] = (end, tier)
        return begin, end

    def reload(self, buffer: int) -> tuple[float, float]:
        copied, tier = self._copied.pop(buffer)
        begin, end = self._transfer(buffer, tier, "in", max(self.now, copied))
        self._ready[buffer] = end
        return begin, end

    def _transfer(self, buffer: int, tier: str, way: str, ready: float) -> tuple[float, float]:
        if self._machine is None or tier not in self._machine.links:
            raise KeyError(f"the machine has no link to tier {tier!r}")
        link = self._machine.links[tier]
        rate = link.out_bytes_per_second if way == "out" else link.in_bytes_per_second
        begin = max(self._lane.get((tier, way), 0.0), ready)
        end = begin + link.latency_seconds + self._program.buffers[buffer].bytes / rate
        self._lane[tier, way] = end
        return begin, end

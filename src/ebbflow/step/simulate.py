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

All bytes follow from what happens to each buffer in turn, so they are computed for all actions at once: one sort by
buffer and action, and a sum. Times are, too, where nothing moves.

Time runs on lanes (compute, and one out and one in per tier). An action starts when its lane is free and its
data is ready; a ``Free`` after an ``Offload`` makes the compute lane wait for the copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ebbflow.step.arrays import Ints, flat
from ebbflow.step.machine import Machine
from ebbflow.step.program import Program
from ebbflow.step.schedule import KINDS, Action, Boundary, Compute, Free, Offload, Reload, Schedule

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

    live_bytes: Ints
    peak_bytes: Ints
    start_seconds: NDArray[np.float64]
    end_seconds: NDArray[np.float64]
    runs: Ints
    tier_bytes: dict[str, Ints] = field(default_factory=dict[str, Ints])

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
    live, peak, runs = _bytes(program, schedule)
    tiers = _tier_bytes(program, schedule)
    if not tiers:
        end = np.cumsum(_seconds(program, schedule))
        return Timeline(live, peak, np.concatenate([[0.0], end])[:-1], end, runs)
    clock = _Clock(program, machine)
    times = np.array([clock.act(action) for action in schedule.actions])
    return Timeline(live, peak, times[:, 0], times[:, 1], runs, tiers)


def overhead_of(program: Program, schedule: Schedule) -> float:
    """The time that a schedule without transfers adds, as a share of the unplanned step: that of its reruns."""
    computes = sum(_seconds(program, schedule).tolist())
    return computes / program.seconds - 1.0 if program.seconds else 0.0


def _seconds(program: Program, schedule: Schedule) -> NDArray[np.float64]:
    """Seconds of computing, per action."""
    kinds, targets = schedule.columns
    seconds = np.zeros(len(kinds))
    computes = kinds == KINDS[Compute]
    seconds[computes] = flat(program).seconds[targets[computes]]
    return seconds


def _bytes(program: Program, schedule: Schedule) -> tuple[Ints, Ints, Ints]:
    """Live bytes after and peak bytes during each action, and runs per op: clauses 1-4 of the module."""
    form = flat(program)
    kinds, targets = schedule.columns
    at = np.flatnonzero(kinds == KINDS[Compute])
    boundary = np.flatnonzero(kinds == KINDS[Boundary])
    ops = targets[at]
    runs = np.bincount(ops, minlength=len(program.ops))
    turn, where = np.arange(len(ops)), np.zeros(len(runs), np.int64)
    where[ops] = turn
    last = where[ops] == turn
    where[ops[::-1]] = turn[::-1]
    first = where[ops] == turn
    state = np.where(runs[ops] > 1, form.state_bytes[ops], 0)  # clause 2
    change = _resident_changes(program, schedule)
    change[at] += np.where(first, state, 0) - np.where(last, state, 0)
    change[boundary] += program.late_bytes
    live = np.cumsum(change)
    peak = live.copy()
    before = (live - change)[at]
    made = np.where(first, form.made_bytes[ops], form.remade_bytes[ops])
    peak[at] = np.maximum(live[at], before + made + form.workspace_bytes[ops] + state)
    peak[boundary] += program.between_excess_bytes
    return live, peak, runs


def _resident_changes(program: Program, schedule: Schedule) -> Ints:
    """Per action, by how much the bytes of buffers with a producer grow.

    A copy that is made is *wanted* if it is read, offloaded or freed before it is made again or reloaded, or if it is
    not reloaded and an output of the program or, with the boundary to come, a mutation. The first copy that is wanted
    or reloaded since the last ``Free`` takes the bytes; the next ``Free``, or for mutations the boundary, gives them
    back.
    """
    form = flat(program)
    kinds, targets = schedule.columns
    actions = len(kinds)
    at = {kind: np.flatnonzero(kinds == number) for kind, number in KINDS.items()}
    read, reader = form.reads.of(targets[at[Compute]])
    made, maker = form.makes.of(targets[at[Compute]])
    mutations = np.array(program.mutations, np.int64)
    boundary = at[Boundary][0] if len(at[Boundary]) else actions
    use, gone, make, load = range(4)  # what an event is
    events = [
        (read, at[Compute][reader], use),
        (made, at[Compute][maker], make),
        (targets[at[Free]], at[Free], gone),
        (targets[at[Offload]], at[Offload], use),
        (targets[at[Reload]], at[Reload], load),
        (mutations, np.full(len(mutations), boundary), gone),
    ]
    buffer = np.concatenate([each for each, _, _ in events])
    when = np.concatenate([each for _, each, _ in events])
    order = np.argsort(buffer * (actions + 1) + when)
    what = np.repeat([each for _, _, each in events], [len(each) for each, _, _ in events])[order]
    buffer, when = buffer[order], when[order]
    same = buffer[1:] == buffer[:-1]
    following = np.full(len(buffer), make)  # what happens to the same buffer next
    following[:-1] = np.where(same, what[1:], make)
    held = form.pinned[buffer] | (form.mutation[buffer] & (when < boundary))
    wanted = (following < make) | (held & (following != load))
    taking = np.flatnonzero((what == load) | ((what == make) & wanted))
    begins = np.ones(len(buffer), np.bool_)
    begins[1:] = ~same | (what[:-1] == gone)
    span = np.cumsum(begins)  # events of one buffer from a free to the next
    taking = taking[np.diff(span[taking], prepend=0) > 0]
    giving = np.flatnonzero(what == gone)
    giving = giving[np.isin(span[giving], span[taking])]
    change = np.zeros(actions + 1, np.int64)
    np.add.at(change, when[taking], form.bytes[buffer[taking]])
    np.subtract.at(change, when[giving], form.bytes[buffer[giving]])
    return change[:actions]


def _tier_bytes(program: Program, schedule: Schedule) -> dict[str, Ints]:
    """Per tier, bytes in it after each action (clause 4)."""
    change: dict[str, Ints] = {}
    tier_of: dict[int, str] = {}
    kinds, _ = schedule.columns
    for index in np.flatnonzero((kinds == KINDS[Offload]) | (kinds == KINDS[Reload])).tolist():
        match schedule.actions[index]:
            case Offload(buffer, tier):
                tier_of[buffer] = tier
                change.setdefault(tier, np.zeros(len(kinds), np.int64))[index] += program.buffers[buffer].bytes
            case Reload(buffer):
                change[tier_of.pop(buffer)][index] -= program.buffers[buffer].bytes
            case _:
                pass
    return {tier: np.cumsum(change[tier]) for tier in sorted(change)}


class _Clock:
    """The time half: lanes and when data is ready."""

    def __init__(self, program: Program, machine: Machine | None) -> None:
        self.now = 0.0  # when the compute lane is free
        self._program = program
        self._machine = machine
        self._lane: dict[tuple[str, str], float] = {}
        self._ready: dict[int, float] = {}  # buffers whose data arrives later than the compute lane's order says
        self._copied: dict[int, tuple[float, str]] = {}  # end and tier of the last offload

    def act(self, action: Action) -> tuple[float, float]:
        """When an action starts and ends, after all those before it."""
        match action:
            case Compute(op):
                return self.compute(op)
            case Free(buffer):
                now = self.free(buffer)
                return now, now
            case Offload(buffer, tier):
                return self.offload(buffer, tier)
            case Reload(buffer):
                return self.reload(buffer)
            case Boundary():
                return self.now, self.now

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

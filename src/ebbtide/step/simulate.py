"""What a schedule does on a machine: the one judge of bytes and seconds that every planner and report uses.

Bytes are a function of the schedule alone, never of seconds (a wrong time estimate costs time, never memory):
1. ``Compute`` allocates workspace and all outputs while its inputs live. When it ends, the workspace goes, and
   so do outputs that were resident already or that nobody reads before they are made again. A rerun makes all
   outputs but those that are made once.
2. A random op that runs more than once keeps its generator state from just before its first run until its last
   run ends, and each repeat takes the size of the state once more (to put the generator back).
3. At ``Boundary`` mutations go, user code reaches its peak, and the tangents and what user code holds appear;
   these stay.
4. ``Offload`` takes bytes in its tier, which stay taken until the step ends, and none on the device; ``Free`` gives
   the device bytes back; ``Reload`` allocates on the device at its own position.

All bytes follow from what happens to each buffer in turn, so they are computed for all actions at once: one sort by
buffer and action, and a sum. Times are, too, where nothing moves.

Time runs on lanes: compute, and one each way per tier, or one for both ways where the link is not duplex. A transfer
starts when its lane is free and its data is ready, and takes ``compute_share`` of its seconds from the compute lane,
which goes on. The compute lane waits at a read for what is being reloaded, at the boundary for all that is, and at the
first ``Free`` after an ``Offload`` for the copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ebbtide.step.arrays import Ints, flat
from ebbtide.step.machine import Link, Machine
from ebbtide.step.program import Program
from ebbtide.step.schedule import KINDS, Action, Boundary, Compute, Free, Offload, Reload, Schedule

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
        wait_seconds: shape ``(actions,)``: for how long the compute lane waits at each action for a transfer.
        transfer_seconds: of all transfers, on their own lanes.
        lanes: per action, the lane it runs on; empty where nothing moves and all run on ``"compute"``.
    """

    live_bytes: Ints
    peak_bytes: Ints
    start_seconds: NDArray[np.float64]
    end_seconds: NDArray[np.float64]
    runs: Ints
    tier_bytes: dict[str, Ints] = field(default_factory=dict[str, Ints])
    wait_seconds: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    transfer_seconds: float = 0.0
    lanes: tuple[str, ...] = ()

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

    @property
    def waited_seconds(self) -> float:
        """For how long the compute lane waits for transfers, in all."""
        return float(self.wait_seconds.sum())

    @property
    def hidden_share(self) -> float:
        """Share of the transfers' seconds for which nobody waits; 1 where nothing moves."""
        return max(1.0 - self.waited_seconds / self.transfer_seconds, 0.0) if self.transfer_seconds else 1.0


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
    if not schedule.moves:
        end = np.cumsum(_seconds(program, schedule))
        return Timeline(live, peak, np.concatenate([[0.0], end])[:-1], end, runs, wait_seconds=np.zeros(len(end)))
    links = {} if machine is None else machine.links
    tiers = _tier_bytes(program, schedule, links)
    clock = _Clock(program, links)
    times = np.array([clock.act(action) for action in schedule.actions])
    return Timeline(
        live,
        peak,
        times[:, 0],
        times[:, 1],
        runs,
        tiers,
        wait_seconds=times[:, 2],
        transfer_seconds=clock.transfer_seconds,
        lanes=tuple(clock.lanes),
    )


def overhead_of(program: Program, schedule: Schedule, machine: Machine | None = None) -> float:
    """The time that a schedule adds, as a share of the unplanned step; ``machine`` as for :func:`simulate`."""
    if not program.seconds:
        return 0.0
    if schedule.moves:
        return simulate(program, schedule, machine).seconds / program.seconds - 1.0
    return sum(_seconds(program, schedule).tolist()) / program.seconds - 1.0


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


def _tier_bytes(program: Program, schedule: Schedule, links: Mapping[str, Link]) -> dict[str, Ints]:
    """Per tier, bytes in it after each action (clause 4)."""
    change: dict[str, Ints] = {}
    kinds, _ = schedule.columns
    for index in np.flatnonzero(kinds == KINDS[Offload]).tolist():
        match schedule.actions[index]:
            case Offload(buffer, tier):
                taken = _link(links, tier).round_up(program.buffers[buffer].bytes)
                change.setdefault(tier, np.zeros(len(kinds), np.int64))[index] += taken
            case _:
                pass
    return {tier: np.cumsum(change[tier]) for tier in sorted(change)}


def _link(links: Mapping[str, Link], tier: str) -> Link:
    if tier not in links:
        raise KeyError(f"the machine has no link to tier {tier!r}")
    return links[tier]


class _Clock:
    """The time half: lanes, and when data is ready."""

    def __init__(self, program: Program, links: Mapping[str, Link]) -> None:
        self.now = 0.0  # when the compute lane is free
        self.transfer_seconds = 0.0
        self.lanes: list[str] = []  # of each action so far
        self._program = program
        self._links = links
        self._lane: dict[str, float] = {}
        self._ready: dict[int, float] = {}  # buffers that are being reloaded: when they are there
        self._copied: dict[int, tuple[float, str]] = {}  # end and tier of the offload
        self._leaving: set[int] = set()  # whose first free is to come

    def act(self, action: Action) -> tuple[float, float, float]:
        """When an action starts and ends, after all those before it, and for how long the compute lane waits."""
        match action:
            case Offload(buffer, tier):
                self._leaving.add(buffer)
                begin, end = self._transfer(buffer, _link(self._links, tier), "out", self.now)
                self._copied[buffer] = end, tier
                return begin, end, 0.0
            case Reload(buffer):
                copied, tier = self._copied[buffer]
                begin, end = self._transfer(buffer, _link(self._links, tier), "in", max(self.now, copied))
                self._ready[buffer] = end
                return begin, end, 0.0
            case Compute(op):
                taken = self._program.ops[op].seconds
                ready = max((self._ready.pop(b, 0.0) for b in self._program.ops[op].inputs), default=0.0)
            case Free(buffer):
                taken, ready = 0.0, 0.0
                if buffer in self._leaving:
                    self._leaving.discard(buffer)
                    ready = self._copied[buffer][0]
            case Boundary():
                taken, ready = 0.0, max(self._ready.values(), default=0.0)
                self._ready.clear()
        self.lanes.append("compute")
        begin = max(self.now, ready)
        waited, self.now = begin - self.now, begin + taken
        return begin, self.now, waited

    def _transfer(self, buffer: int, link: Link, direction: Literal["out", "in"], ready: float) -> tuple[float, float]:
        lane = link.lane(direction)
        seconds = link.seconds(self._program.buffers[buffer].bytes, direction)
        begin = max(self._lane.get(lane, 0.0), ready)
        self._lane[lane] = begin + seconds
        self.now += seconds * link.compute_share
        self.transfer_seconds += seconds
        self.lanes.append(lane)
        return begin, begin + seconds

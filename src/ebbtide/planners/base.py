"""The contract of a planner: a pure function from a program and a budget to a schedule.

One algorithm per file; a planner registers itself under its name (``planners/registry.py``). A planner may assume a
valid program with costs, must never return a schedule that is illegal or over its budget (status ``FEASIBLE`` or
``OPTIMAL`` promises both), and must return its best so far when its effort, its time limit or Ctrl-C ends it. It never
prints: it reports through ``Problem.progress``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ebbtide.step.status import Status
from ebbtide.units import format_bytes, format_gap, format_percent

if TYPE_CHECKING:  # programs need numpy, which who asks for names alone has no need of
    from ebbtide.step.machine import Link, Machine
    from ebbtide.step.program import Program
    from ebbtide.step.schedule import Schedule

__all__ = [
    "AS_CAPTURED",
    "DEFAULT_EFFORT",
    "FREE_ORDER",
    "LARGE_OPS",
    "PROGRAM_ORDER",
    "Answer",
    "Interrupt",
    "Problem",
    "Progress",
    "Status",
    "silent",
    "tiers_order",
]


DEFAULT_EFFORT = 20_000
"""Local-search moves a planner may try, about a second on a 600-op program; solvers' work goes with it."""
LARGE_OPS = 3_000
"""Ops from which a program is large: repeated blocks are planned once, and start points are chosen with thrift."""


PROGRAM_ORDER = "order: program, boundary: captured, tiers: none, costs: given"
"""Bound class: all schedules that recompute, copies live whenever that helps, first runs in captured order, the
boundary where it was captured among them; and the seconds of ops are those that the plan was made with."""
FREE_ORDER = "order: free, boundary: free, tiers: none, costs: given"
"""Bound class: likewise, first runs and the boundary in any legal order."""
AS_CAPTURED = "PyTorch's op order and boundary"
"""What :data:`PROGRAM_ORDER`, every floor and every refusal assume, in words for people."""


def tiers_order(tiers: Sequence[str]) -> str:
    """The bound class of :data:`PROGRAM_ORDER` where buffers may be moved to ``tiers`` as well, as often as legal."""
    return PROGRAM_ORDER.replace("tiers: none", f"tiers: {' '.join(sorted(tiers))}") if tiers else PROGRAM_ORDER


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known while a step is captured and planned; its text is one line.

    Attributes:
        stage: what it is doing, in a few words.
        best_overhead: overhead of the best schedule so far, or ``None``.
        bound: proven lower bound on the overhead so far, or ``None``.
        smallest_bytes: the least budget for which a schedule is known so far, or ``None`` where none is looked for.
    """

    stage: str
    best_overhead: float | None = None
    bound: float | None = None
    smallest_bytes: int | None = None

    def __str__(self) -> str:
        known: list[str] = []
        if self.best_overhead is not None:
            known.append(f"best overhead {format_percent(self.best_overhead)}")
        if self.bound is not None:
            known.append(f"bound {format_percent(self.bound)}")
        if self.best_overhead is not None and self.bound is not None:
            known.append(f"gap {format_gap(self.best_overhead - self.bound)}")
        if self.smallest_bytes is not None:
            known.append(f"smallest so far {format_bytes(self.smallest_bytes)}")
        return f"{self.stage}: {', '.join(known)}" if known else self.stage


class Interrupt:
    """Tells a planner when to stop: a time limit, or :meth:`set` from a signal handler or another thread."""

    def __init__(self, time_limit_seconds: float | None = None) -> None:
        self._event = threading.Event()
        self._deadline = None if time_limit_seconds is None else time.monotonic() + time_limit_seconds

    def set(self) -> None:
        """Ask the planner to stop and return its best so far."""
        self._event.set()

    @property
    def interrupted(self) -> bool:
        """Whether :meth:`set` was called."""
        return self._event.is_set()

    @property
    def expired(self) -> bool:
        """Whether the time limit has passed."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def __bool__(self) -> bool:
        return self.interrupted or self.expired

    @property
    def seconds_left(self) -> float:
        """Seconds to the time limit, 0 once it is true; infinite without a limit."""
        if self:
            return 0.0
        return float("inf") if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def without_limit(self) -> Interrupt:
        """An interrupt that is true once this one was set, whatever its time limit."""
        return _Derived(lambda: self.interrupted, lambda: self.interrupted)

    def or_after(self, seconds: float) -> Interrupt:
        """An interrupt that is true once this one is, or ``seconds`` from now."""
        limit = Interrupt(min(seconds, self.seconds_left))
        derived = _Derived(lambda: bool(self) or bool(limit), lambda: self.interrupted)
        derived._deadline = limit._deadline
        return derived


class _Derived(Interrupt):
    """An interrupt that follows another: it is true where ``holds`` says so, and set where ``was_set`` does."""

    def __init__(self, holds: Callable[[], bool], was_set: Callable[[], bool]) -> None:
        super().__init__()
        self._holds, self._was_set = holds, was_set

    @property
    def interrupted(self) -> bool:
        """Whether it or what it follows was set."""
        return super().interrupted or self._was_set()

    def __bool__(self) -> bool:
        return self._holds() or self.interrupted


def silent(_: Progress) -> None:
    """No progress wanted."""


def changes_to(progress: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """``progress`` without what it was told last already."""
    last: Progress | None = None

    def tell(each: Progress) -> None:
        nonlocal last
        if each != last:
            last = each
            progress(each)

    return tell


@dataclass(frozen=True)
class Problem:
    """What a planner is asked.

    Attributes:
        program: with costs.
        above_budget_bytes: what the step may take above its start: budget minus resident bytes.
        machine: for the seconds of transfers; planners that only recompute ignore it.
        tiers: that buffers may be moved to, the preferred one first; likewise.
        effort: how many local-search moves a planner may try; deterministic, unlike a clock.
        seed: of every random choice.
        seeds: schedules to start from (of a smaller budget, of a cheaper planner).
        interrupt: when to stop.
        progress: called with what is known, from the planner's own thread.
        settings: what followed the planner's name, of the class that it registered; ``None`` where nothing did.
    """

    program: Program
    above_budget_bytes: int
    machine: Machine | None = None
    effort: int = DEFAULT_EFFORT
    seed: int = 0
    seeds: tuple[Schedule, ...] = ()
    interrupt: Interrupt = field(default_factory=Interrupt)
    progress: Callable[[Progress], None] = silent
    tiers: tuple[str, ...] = ()
    settings: Any = None

    @property
    def links(self) -> Mapping[str, Link]:
        """The machine's links to the tiers; empty where nothing may be moved."""
        return {} if self.machine is None else {tier: self.machine.links[tier] for tier in self.tiers}


@dataclass(frozen=True)
class Answer:
    """What a planner found.

    Attributes:
        status: how it ended.
        schedule: ``None`` exactly if no schedule within the budget was found.
        bound: proven lower bound on the overhead at this budget with the program's costs, or ``None`` if the planner
            proves none. It bounds what is predicted, not what will be measured.
        bound_class: the class of schedules in which ``bound`` holds, as :data:`PROGRAM_ORDER`.
        notes: facts for the plan's provenance.
    """

    status: Status
    schedule: Schedule | None
    bound: float | None = None
    bound_class: str = ""
    notes: dict[str, str] = field(default_factory=dict[str, str])

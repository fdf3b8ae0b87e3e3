"""The contract of a planner: a pure function from a program and a budget to a schedule.

One algorithm per file; a planner registers itself under its name with :func:`planner` and is found by
:func:`planner_named`. A planner may assume a valid program with costs, must never return a schedule that is
illegal or over its budget (status ``FEASIBLE`` or ``OPTIMAL`` promises both), and must return its best so far
when its effort, its time limit or Ctrl-C ends it. It never prints: it reports through ``Problem.progress``.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ebbtide.errors import UsageError
from ebbtide.names import did_you_mean
from ebbtide.planners.settings import base_name, has_settings, settings_from
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
    "HOMES",
    "LARGE_OPS",
    "NEED_TIERS",
    "PROGRAM_ORDER",
    "Answer",
    "Interrupt",
    "Planner",
    "Problem",
    "Progress",
    "Status",
    "finds_smallest",
    "missing_package",
    "moves_buffers",
    "planner",
    "planner_named",
    "planner_names",
    "require_planner",
    "require_tiers",
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
AS_CAPTURED = "first runs and boundary as captured"
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


Planner = Callable[[Problem], Answer]

HOMES = {
    "anneal": "ebbtide.planners.published.fastsa",
    "ap_greedy": "ebbtide.planners.published.chen",
    "ap_sqrt": "ebbtide.planners.published.chen",
    "auto": "ebbtide.planners.auto",
    "auto_free": "ebbtide.planners.auto_free",
    "capuchin": "ebbtide.planners.published.capuchin",
    "chain": "ebbtide.planners.published.rotor",
    "checkmate": "ebbtide.planners.published.checkmate",
    "checkmate_free": "ebbtide.planners.published.checkmate",
    "checkmate_lp": "ebbtide.planners.published.checkmate_lp",
    "checkmate_lp_pure": "ebbtide.planners.published.checkmate_lp",
    "chen_greedy": "ebbtide.planners.published.chen",
    "chen_sqrt": "ebbtide.planners.published.chen",
    "echo": "ebbtide.planners.published.echo",
    "greedy": "ebbtide.planners.search.greedy",
    "keep_all": "ebbtide.planners.keep_all",
    "least_memory": "ebbtide.planners.search.smallest",
    "libra": "ebbtide.planners.published.libra",
    "linearized_greedy": "ebbtide.planners.published.chen",
    "linearized_sqrt": "ebbtide.planners.published.chen",
    "min_cut": "ebbtide.planners.published.min_cut",
    "per_block": "ebbtide.planners.published.per_block",
    "retention": "ebbtide.planners.published.moccasin",
    "revolve": "ebbtide.planners.published.revolve",
    "swap": "ebbtide.planners.published.swap",
    "tflms": "ebbtide.planners.published.tflms",
}
"""Per planner of this package its module, imported when it is first asked for: most need numba, some a solver."""

NEED_TIERS = frozenset({"capuchin", "libra", "swap", "tflms"})
"""Planners of :data:`HOMES` whose plans are about moving buffers: entry points refuse them where there is no tier."""

_REGISTRY: dict[str, Planner] = {}
_SETTINGS: dict[str, type[Any]] = {}
_NEEDS: dict[str, str] = {}  # per planner that needs one: a package that is not of the core install
_FIND_SMALLEST: set[str] = set()
_MOVE: set[str] = set()


def planner(
    name: str,
    *,
    module: str = "",
    finds_smallest: bool = False,
    moves: bool = False,
    settings: type[Any] | None = None,
) -> Callable[[Planner], Planner]:
    """Register a planner.

    Args:
        name: what ``planner=`` calls it.
        module: one that it imports and that may not be installed.
        finds_smallest: whether it looks for the schedule of least memory itself where the budget is deep; others
            are given that schedule as a seed.
        moves: whether it moves buffers to the problem's tiers; others only recompute.
        settings: a dataclass of what may follow its name (``planners/settings.py``).
    """

    def register(function: Planner) -> Planner:
        assert name not in _REGISTRY, f"two planners are named {name}"
        _REGISTRY[name] = function
        if module:
            _NEEDS[name] = module
        if finds_smallest:
            _FIND_SMALLEST.add(name)
        if moves:
            _MOVE.add(name)
        if settings is not None:
            _SETTINGS[name] = settings
        return function

    return register


def planner_names() -> list[str]:
    """Names that ``planner=`` knows."""
    return sorted({*HOMES, *_REGISTRY})


def finds_smallest(name: str) -> bool:
    """Whether planner ``name`` needs no seed to find a plan at the smallest workable budget."""
    return _loaded(name) in _FIND_SMALLEST


def moves_buffers(name: str) -> bool:
    """Whether planner ``name`` moves buffers to the tiers that it is given."""
    return _loaded(name) in _MOVE


def missing_package(name: str) -> str:
    """How to install what planner ``name`` needs and is not there; empty if nothing is missing."""
    name = _loaded(name)
    module = _NEEDS.get(name, "")
    if not module or importlib.util.find_spec(module) is not None:
        return ""
    return f"planner {name!r} needs {module}, which is not installed: pip install {module}"


def require_planner(name: object) -> None:
    """Refuse a name that no planner has, and settings that it does not take; imports none that is given no settings.

    Raises:
        UsageError: listing the names there are, or the settings.
    """
    base = base_name(name) if isinstance(name, str) else ""
    if not isinstance(name, str) or (base not in HOMES and base not in _REGISTRY):
        near = did_you_mean(base, planner_names()) if isinstance(name, str) else ""
        raise UsageError(
            f"planner {name!r} does not exist; accepted: {', '.join(planner_names())}{near}",
            argument="planner",
            value=name,
            accepted=planner_names(),
        )
    if has_settings(name):
        settings_from(name, _SETTINGS.get(_loaded(name)))


def require_tiers(name: str, tiers: Sequence[object], machine: object, links: Sequence[str] | None) -> None:
    """Refuse a planner that moves buffers where there is no tier to move them to.

    Args:
        name: of a planner.
        tiers: that are given.
        machine: its name; ``None`` for the one at hand.
        links: the tiers to which that one has links, if known.

    Raises:
        UsageError: naming the machine, and what it has links to.
    """
    if tiers or base_name(name) not in NEED_TIERS:
        return
    what = "this machine" if machine is None else f"machine {machine!r}"
    if links:
        said = f"{what} has a link to {' and '.join(links)}: give tiers={links[0]!r}"
    elif links is None:
        said = f"none is given for {what}: give tiers='disk' where the model is on CPU, tiers='host' for a card"
    else:
        said = f"{what} has no link"
    raise UsageError(
        f"planner {name!r} moves buffers and needs a tier to move them to; {said}, or use planner='auto'",
        argument="tiers",
        value=None,
        accepted=tuple(links or ()),
    )


def planner_named(name: str) -> Planner:
    """The planner ``name``, with the settings that follow its name.

    Raises:
        UsageError: if there is none, listing those there are, or if a package that it needs is not installed, or for
            settings that it does not take.
    """
    require_planner(name)
    if missing := missing_package(name):
        raise UsageError(missing, argument="planner", value=name)
    function = _REGISTRY[base_name(name)]
    if not has_settings(name):
        return function
    settings = settings_from(name, _SETTINGS.get(base_name(name)))
    return lambda problem: function(replace(problem, settings=settings))


def _loaded(name: str) -> str:
    """The planner's name alone, once its module is imported."""
    name = base_name(name)
    if name not in _REGISTRY and name in HOMES:
        importlib.import_module(HOMES[name])
    return name

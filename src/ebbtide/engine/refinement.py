"""Plans that were found quickly, and what takes their place: a better one is searched beside training.

1. A first call ends with a plan that is found quickly. Its full search runs in another process
   (:mod:`~ebbtide.planning.beside`), for one plan of a model after the other, the newest first.
2. Between two steps what it has found is looked at. A plan that repays being lowered and proven within
   :data:`REPAID_STEPS` steps joins those of its step, where the best that holds is taken. Any other tells what is known
   now of the plan that stays: its bound, and the smallest budget.
3. What is asked for no more, as after another budget was set, is not searched any further.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ebbtide.engine.executable import Executable
from ebbtide.engine.step import Step
from ebbtide.errors import EbbtideError
from ebbtide.faults import own_faults
from ebbtide.planners.base import Problem
from ebbtide.planning.beside import Search
from ebbtide.planning.pipeline import PlanningOptions, full_search, refined
from ebbtide.planning.step_end import StepEnd
from ebbtide.report.plan import Plan
from ebbtide.step.provenance import Planned
from ebbtide.units import format_percent

__all__ = ["REPAID_STEPS", "Refinements", "Wanted", "contenders_of"]

REPAID_STEPS = 1_000
"""Steps within which a plan has to save what it takes to put it in place: an epoch of a small run."""
MOST_TIMES = 1.05
"""Up to which times the best plan's seconds the programs of other plans are searched too."""
_MOST_WAITING = 16  # plans of one model whose search waits for another's; of more, the oldest go
_logger = logging.getLogger("ebbtide")


@dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """A better plan that is wanted.

    Attributes:
        step: it is of.
        plan: that runs meanwhile.
        others: of other programs for the same call, not much slower by what was found quickly.
        end: what is taken when the backward has returned.
        options: how the plan was made.
        lower: makes an executable of a plan of the same step.
        choose: keeps for the next start by which rewrites the best plan came about.
        lower_seconds: what that took for ``plan``.
        request: number of the request that it was made for.
    """

    step: Step
    plan: Plan
    others: Sequence[Plan]
    end: StepEnd
    options: PlanningOptions
    lower: Callable[[Plan], Executable]
    choose: Callable[[Plan], None]
    lower_seconds: float
    request: int


@dataclass(eq=False)
class Refinements:
    """The better plans that are wanted of one model."""

    _waiting: list[Wanted] = field(default_factory=list[Wanted])  # the newest comes last
    _now: tuple[Wanted, list[Problem], Search] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _at_exit: Any = None

    def want(self, wanted: Wanted) -> None:
        """Search for a better plan than one that was found quickly."""
        if wanted.plan.provenance.planned is not Planned.QUICKLY or wanted.plan.planner != wanted.options.planner:
            return
        with self._lock:
            if self._now is not None and self._now[0].step is wanted.step:
                self._stop()
            self._waiting = [each for each in self._waiting if each.step is not wanted.step]
            self._waiting = [*self._waiting, wanted][-_MOST_WAITING:]
            self._begin_next()

    def look(self, request: int) -> None:
        """Put in place what was found since, if anything was; ``request`` is the number of what is asked for now."""
        if self._now is None or self._now[2].goes_on or _is_recorded() or not self._lock.acquire(blocking=False):
            return
        try:
            if self._now is None or self._now[2].goes_on:
                return
            wanted, problems, search = self._now
            self._stop()
            self._waiting = [each for each in self._waiting if each.request == request]
            self._begin_next()
            found = zip((wanted.plan, *wanted.others), problems, search.answers(), strict=False)
            plans = [
                refined(plan, problem, answer, wanted.options, wanted.end)
                for plan, problem, answer in found
                if answer is not None
            ]
            better = [each for each in plans if each is not None]
            if wanted.request == request and better:
                _put_in_place(wanted, better)
        finally:
            self._lock.release()

    def end(self) -> None:
        """Search for nothing any more."""
        with self._lock:
            self._waiting.clear()
            self._stop()

    def _begin_next(self) -> None:
        while self._now is None and self._waiting:
            wanted = self._waiting.pop()
            problems = [full_search(each, wanted.options) for each in (wanted.plan, *wanted.others)]
            search = Search.begin(wanted.plan.planner, problems)
            if search is not None:
                self._now = (wanted, problems, search)
                self._at_exit = weakref.finalize(self, search.end)
                _logger.info("%r: a better plan is looked for beside training", wanted.plan)

    def _stop(self) -> None:
        if self._now is not None:
            if self._now[2].goes_on:
                self._now[2].end()
            self._now = None
        if self._at_exit is not None:
            self._at_exit.detach()


def _is_recorded() -> bool:
    """Whether a CUDA graph is recorded, in which no plan can be proven."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def contenders_of(plan: Plan, made: Iterable[Plan]) -> list[Plan]:
    """Those of ``made`` that are of another program for the call of ``plan``, and not much slower."""
    found = {each.program.fingerprint: each for each in made if _room_of(each) == _room_of(plan)}
    found.pop(plan.program.fingerprint, None)
    return [each for each in found.values() if each.step_seconds <= MOST_TIMES * plan.step_seconds]


def _room_of(plan: Plan) -> tuple[int, ...]:
    program = plan.program
    sizes = (plan.budget_bytes, plan.resident_bytes, plan.reserve_bytes, program.between_bytes, program.held_bytes)
    return sizes


def _put_in_place(wanted: Wanted, better: Sequence[Plan]) -> None:
    """Give the step the best of what was found, as far as it is worth it."""
    before, plan = wanted.plan, min(better, key=lambda each: each.step_seconds)
    wanted.choose(plan)
    if (before.step_seconds - plan.step_seconds) * REPAID_STEPS <= wanted.lower_seconds:
        same = [each for each in better if each.program is before.program]
        if not same:
            return
        plan = replace(same[0], schedule=before.schedule, status=before.status)
    try:
        with own_faults():
            wanted.step.offer(wanted.lower(plan))
    except EbbtideError as error:
        _logger.warning("a better plan was found, and cannot be used: %s", error)
        return
    what = f"looked for beside training, in place of {format_percent(before.overhead)}"
    _logger.info("%r: %s", plan, what if plan.schedule != before.schedule else "none that was looked for is better")

"""Peaks and overheads of a captured step on a card, as rows: keep-all, a planner at a budget, and its smallest peak.

1. Peaks are of everything, what is resident included, in MB of 10^6 bytes. Seconds, and samples a second, are
   predicted: costs by roofline.
2. The *smallest peak at a limit* of ``auto`` is found by bisection on the budget: the plan of least peak that was found
   whose overhead is within the limit, and beside it the largest budget of which a bound proves that no plan within the
   limit fits it (or the floor, where no such budget was met). That of ``echo`` is the least peak of its plans at
   :data:`CAPS` (``ebbtide_published.planners.echo``, definition 3) within the limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ebbtide import Case
from ebbtide._api.estimate import AheadStep, capture_ahead
from ebbtide.capture.without_memory import without_memory
from ebbtide.options import Options
from ebbtide.planners import Answer
from ebbtide.planners.base import DEFAULT_EFFORT
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.hybrid.floor import floor_with_tiers
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.planners.search.reruns_from_kept import reruns_for_residents
from ebbtide.step.machine import Machine
from ebbtide.step.program import Program
from ebbtide_published.planners.echo import decided, residents_of
from harness.batched import ABOVE, Planned, planned, unplanned_peak, with_link

__all__ = ["MB", "Footprint", "Smallest"]

MB = 1e6
CAPS = (0, 1, 8, None)  # the two versions of its authors, and two between them
TIERS = ("host",)
HALVINGS = 7  # of the range from the floor to the unplanned peak: to within 0.8 % of it
SECONDS = 300.0  # for one plan; those that move are searched longest


@dataclass(frozen=True)
class Smallest:
    """Definition 2.

    Attributes:
        peak_bytes: of the best plan.
        overhead: its, a fraction.
        no_less_bytes: of which a bound or the floor proves that no plan within the limit is below.
        plans: that were made.
        cpu_seconds: they took.
    """

    peak_bytes: int
    overhead: float
    no_less_bytes: int
    plans: int
    cpu_seconds: float


class Footprint:
    """One step, captured for a card.

    Args:
        make: its case.
        machine: the card.
        adam: whether the states of Adam are resident.
    """

    def __init__(self, make: Callable[[], Case], machine: Machine, *, adam: bool = False) -> None:
        begin = time.process_time()
        with without_memory():
            case = make()
            options = Options(machine=machine, optimizer=_adam if adam else None)
            self.step: AheadStep = capture_ahead(case.model, case.args, case.kwargs, options=options, name=case.name)
        self.capture_cpu_seconds = time.process_time() - begin
        self.machine = machine
        self.unplanned_bytes = unplanned_peak(self.step)
        self._echo: list[tuple[int, float]] | None = None

    @property
    def program(self) -> Program:
        return self.step.program

    def floor(self, link: float | None = None) -> tuple[int, str]:
        """No plan, with a link or without, has a peak below these bytes, and the op that pins them."""
        above, where = floor_bytes(self.program) if link is None else floor_with_tiers(self.program, self.machine.links)
        ops = self.program.ops
        return self.step.resident_bytes + above, ops[where].target if where < len(ops) else "the end of the step"

    def plan(
        self, budget_bytes: int, planner: str = "auto", link: float | None = None, enough: float | None = None
    ) -> Planned:
        """A plan; ``link`` is the share of the link's rates at which buffers may move to the host, if they may."""
        machine = self.machine if link is None else with_link(self.machine, link)
        return planned(
            self.step,
            budget_bytes,
            planner,
            machine,
            tiers=() if link is None else TIERS,
            enough=enough,
            effort=DEFAULT_EFFORT,
            limit_seconds=SECONDS,
        )

    def echo(self) -> list[tuple[int, float]]:
        """Peak and overhead of Echo's plan at each cap."""
        if self._echo is None:
            self._echo = []
            state = IntervalState(self.program)
            for cap in CAPS:
                state.load(reruns_for_residents(self.program, residents_of(self.program, decided(self.program, cap))))
                self._echo.append((self.step.resident_bytes + state.peak_bytes, state.overhead))
        return self._echo

    def echo_within(self, budget_bytes: int) -> tuple[int, float] | None:
        """Peak and overhead of keep-all if it fits, else of the cheapest of Echo's plans that does."""
        if self.unplanned_bytes <= budget_bytes:
            return self.unplanned_bytes, 0.0
        fits = [each for each in self.echo() if each[0] <= budget_bytes]
        return min(fits, key=lambda each: each[1], default=None)

    def smallest_of_echo(self, limit: float) -> Smallest:
        """Definition 2; keep-all's peak where none of its plans is within the limit."""
        begin = time.process_time()
        within = [each for each in self.echo() if each[1] <= limit + ABOVE]
        peak, overhead = min([*within, (self.unplanned_bytes, 0.0)])
        return Smallest(peak, overhead, 0, len(CAPS), time.process_time() - begin)

    def smallest(self, limit: float, link: float | None = None, also: Sequence[int] = ()) -> Smallest:
        """Definition 2, of ``auto``; budgets of ``also`` that are still open in the end are asked about as well."""
        low = no_less = self.floor(link)[0]
        high, best, plans, seconds = self.unplanned_bytes, (self.unplanned_bytes, 0.0), 0, 0.0
        for budget in (*[None] * HALVINGS, *sorted(also, reverse=True)):
            if budget is None:
                budget = (low + high) // 2
            elif not no_less < budget < best[0]:
                continue
            found = self.plan(budget, link=link, enough=limit)
            plans, seconds = plans + 1, seconds + found.cpu_seconds
            if found.overhead is not None and found.overhead <= limit + ABOVE:
                high, best = min(high, budget), min(best, (found.peak_bytes, found.overhead))
            else:
                low = max(low, budget)
                if _proves(found.answer, limit):
                    no_less = max(no_less, budget)
        return Smallest(*best, no_less, plans, seconds)


def _proves(answer: Answer, limit: float) -> bool:
    """Whether the bound says that no plan is within the limit."""
    return answer.bound is not None and answer.bound > limit


def _adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())

"""A model at any batch, planned for a card of the catalogue: the search for the largest batch, for any planner.

1. A step is captured under fake tensors and priced by roofline. Between two captures it is interpolated
   (``interpolated``), and the batch that is answered is captured as it is and planned again.
2. A planner *fits* a batch if it finds a legal plan within the card's bytes and the limit on the overhead. Overheads
   are of the unplanned step at the same batch, waits for transfers included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ebbtide import Case
from ebbtide._api.batches import largest
from ebbtide._api.estimate import AheadStep, capture_ahead
from ebbtide.capture.without_memory import without_memory
from ebbtide.options import Options
from ebbtide.planners import Answer, Interrupt, Problem, Progress, planner_named
from ebbtide.step.legality import check
from ebbtide.step.machine import Link, Machine
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_bytes
from harness.interpolated import interpolated

__all__ = ["Batched", "Planned", "captured", "judged", "planned", "planned_above", "unplanned_peak", "with_link"]

EFFORT = 2_000  # local-search moves, while searching and for the answer
ABOVE = 1e-9  # of an overhead: what rounding may add


def with_link(machine: Machine, rate: float) -> Machine:
    """``machine`` with links of ``rate`` times their bytes a second."""
    return replace(machine, links={name: link.slowed(rate) for name, link in machine.links.items()})


def captured(make: Callable[[], Case], machine: Machine) -> AheadStep:
    """The step of a case for ``machine``, with its costs; no batch takes memory."""
    with without_memory():
        case = make()
        return capture_ahead(case.model, case.args, case.kwargs, name=case.name, options=Options(machine=machine))


def unplanned_peak(step: AheadStep) -> int:
    """Bytes of the unplanned step's peak, what is resident included, as the allocator would count them."""
    return step.resident_bytes + unplanned_bytes(step.program)


@dataclass(frozen=True)
class Planned:
    """A plan as the simulator sees it, checked.

    Attributes:
        answer: the planner's.
        overhead: of the plan, a fraction; ``None`` if there is no plan, or the checker refused it.
        seconds: of the planned step.
        peak_bytes: what is resident included.
        cpu_seconds: that planning took.
    """

    answer: Answer
    overhead: float | None
    seconds: float
    peak_bytes: int
    cpu_seconds: float


def planned(
    step: AheadStep,
    budget_bytes: int,
    planner: str,
    machine: Machine,
    *,
    tiers: tuple[str, ...] = (),
    enough: float | None = None,
    effort: int = EFFORT,
    limit_seconds: float | None = None,
    seeds: tuple[Schedule, ...] = (),
) -> Planned:
    """The plan of ``planner`` for ``step`` within ``budget_bytes``.

    Args:
        step: captured or interpolated.
        budget_bytes: of the whole peak, what is resident included.
        planner: name, with its settings.
        machine: whose links count.
        tiers: that may be moved to.
        enough: an overhead at which the search may end, as it does once a bound proves that there is no such plan.
        effort: local-search moves.
        limit_seconds: of planning.
        seeds: schedules to start from.
    """
    above = budget_bytes - step.resident_bytes
    found = planned_above(
        step.program,
        above,
        planner,
        machine,
        tiers=tiers,
        enough=enough,
        effort=effort,
        limit_seconds=limit_seconds,
        seeds=seeds,
    )
    return found if found.answer.schedule is None else replace(found, peak_bytes=found.peak_bytes + step.resident_bytes)


def planned_above(
    program: Program,
    above: int,
    planner: str,
    machine: Machine,
    *,
    tiers: tuple[str, ...] = (),
    enough: float | None = None,
    effort: int = EFFORT,
    limit_seconds: float | None = None,
    seeds: tuple[Schedule, ...] = (),
) -> Planned:
    """The same of a program within ``above`` bytes above the step's start; the peak is above it, too."""
    interrupt = Interrupt(limit_seconds)
    bound_holds = planner == "auto" and not tiers  # with tiers, bounds of plans that only recompute are told too

    def tell(progress: Progress) -> None:
        if enough is None:
            return
        if progress.best_overhead is not None and progress.best_overhead <= enough:
            interrupt.set()
        if bound_holds and progress.bound is not None and progress.bound > enough:
            interrupt.set()

    problem = Problem(
        program,
        above,
        machine=machine,
        tiers=tiers,
        effort=effort,
        interrupt=interrupt,
        progress=tell,
        seeds=seeds,
    )
    begin = time.process_time()
    answer = planner_named(planner)(problem)
    cpu_seconds = time.process_time() - begin
    if answer.schedule is None:
        return Planned(answer, None, 0.0, 0, cpu_seconds)
    return judged(program, above, answer, machine, problem.links, cpu_seconds)


def judged(
    program: Program,
    above: int,
    answer: Answer,
    machine: Machine,
    links: Mapping[str, Link],
    cpu_seconds: float = 0.0,
) -> Planned:
    """An answer's schedule as simulator and legality checker see it on ``program``."""
    assert answer.schedule is not None
    timeline = simulate(program, answer.schedule, machine)
    legal = not check(program, answer.schedule, above, links)
    overhead = timeline.seconds / program.seconds - 1.0
    return Planned(answer, overhead if legal else None, timeline.seconds, timeline.above_bytes, cpu_seconds)


class Batched:
    """A model at any batch on one card.

    Args:
        make: from a batch to its case.
        machine: of the catalogue.
        between: two batches to interpolate from; steps of all others are computed from these two captures.
    """

    def __init__(self, make: Callable[[int], Case], machine: Machine, between: tuple[int, int]) -> None:
        self.machine = machine
        self.capture_seconds: dict[int, float] = {}
        self._make = make
        self._steps: dict[int, AheadStep] = {}
        low, high = between
        at = interpolated(self.captured(low), self.captured(high), between)
        if at is None:
            raise ValueError(f"the ops of batch {low} are not those of batch {high}; interpolate between others")
        self.at = at

    def captured(self, batch: int) -> AheadStep:
        """The step of ``batch``, captured as it is."""
        if batch not in self._steps:
            begin = time.process_time()
            self._steps[batch] = captured(lambda: self._make(batch), self.machine)
            self.capture_seconds[batch] = time.process_time() - begin
        return self._steps[batch]

    def unplanned(self, budget_bytes: int, guess: int = 1) -> int:
        """The largest batch whose unplanned step fits, by interpolation."""
        return largest(lambda batch: unplanned_peak(self.at(batch)) <= budget_bytes, guess)

    def largest(
        self,
        budget_bytes: int,
        planner: str,
        *,
        machine: Machine | None = None,
        tiers: tuple[str, ...] = (),
        most_overhead: float | None = None,
        guess: int = 1,
        coarse: int = 1,
        limit_seconds: float | None = None,
    ) -> int:
        """The largest batch that ``planner`` fits, by interpolation; arguments as for :func:`planned`.

        Args:
            budget_bytes: of the whole peak.
            planner: name, with its settings.
            machine: whose links count; that of the captures if ``None``.
            tiers: that may be moved to.
            most_overhead: a fraction; ``None`` allows any.
            guess: to start from.
            coarse: how far the answer may be below the largest, plus 1.
            limit_seconds: for each plan.
        """

        def fits(batch: int) -> bool:
            found = planned(
                self.at(batch),
                budget_bytes,
                planner,
                machine or self.machine,
                tiers=tiers,
                enough=float("inf") if most_overhead is None else most_overhead,
                limit_seconds=limit_seconds,
            )
            return found.overhead is not None and (most_overhead is None or found.overhead <= most_overhead + ABOVE)

        return largest(fits, max(guess, 1), coarse)

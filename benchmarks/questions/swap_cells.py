"""A cell of a table of Meng et al. under each planner: what it reaches, at which overhead, and what is proven.

1. Steps are captured at two batches, without memory, and priced by roofline: seconds and samples a second are
   *predicted*. Between the two they are interpolated.
2. *At the target* is at the batch (in M2: the megabytes) that the paper reached. Overheads are of the unplanned step at
   the same batch. ``bound`` is proven, of the overhead, in the class of the planner's plans.
3. ``largest`` is the largest batch at an overhead of :data:`MOST_OVERHEAD` or less, within a sixteenth of the target;
   of the default, whose target this is, within a thirty-second.
4. A target is *forbidden* where the floor is above the budget, or the bound above the overhead that is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ebbtide._api.batches import largest
from ebbtide._api.estimate import AheadStep
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.hybrid.floor import floor_with_tiers
from ebbtide.step.machine import Machine
from harness.batched import Batched, Planned, planned, unplanned_peak, with_link
from harness.record import Check, Row, at_least, at_most, holds
from questions.swap_sizes import CARD, MB, TOLERANCE, Published

__all__ = [
    "DEFAULT",
    "MOST_OVERHEAD",
    "Method",
    "batch_rows",
    "batched_of",
    "floor_of",
    "methods",
    "plan_columns",
    "verdict",
]

MOST_OVERHEAD = 0.10
LIMIT_SECONDS = 600.0  # for a plan of the default
THEIR_SECONDS = 240.0  # for one of the others
EFFORT = 2_000  # local-search moves
SEARCH_SECONDS = 120.0  # for a plan on the way to the largest batch
SEARCHED_OPS, DEFAULT_OPS = 2_000, 8_000  # with more, only what the target asks is planned; the latter of the default
COARSE = 16


@dataclass(frozen=True)
class Method:
    """A planner with what it may use.

    Attributes:
        planner: its name.
        tiers: that it may move to.
        link: rate of the link, of that of the catalogue.
    """

    planner: str
    tiers: tuple[str, ...] = ()
    link: float = 1.0

    @property
    def label(self) -> str:
        return f"{self.planner}, host at {self.link:.0%}" if self.tiers else self.planner

    @property
    def machine(self) -> Machine:
        return with_link(CARD, self.link)

    def plan(self, step: AheadStep, budget_bytes: int, *, enough: float | None = None) -> Planned:
        """A plan; ``enough`` is an overhead at which the search may end."""
        seconds = LIMIT_SECONDS if self.planner == "auto" else THEIR_SECONDS
        if enough is not None:
            seconds = min(seconds, SEARCH_SECONDS)
        return planned(
            step,
            budget_bytes,
            self.planner,
            self.machine,
            tiers=self.tiers,
            enough=enough,
            effort=EFFORT,
            limit_seconds=seconds,
        )

    def searches(self, ops: int) -> bool:
        """Whether the largest batch is searched for on a program of so many ops."""
        return ops <= (DEFAULT_OPS if self == DEFAULT else SEARCHED_OPS)


DEFAULT = Method("auto", ("host",))


def methods(*alone: str) -> tuple[Method, ...]:
    """All that are compared: the default, it without tiers, those of ``alone`` likewise, and what moves."""
    moving = [Method(name, ("host",), link) for name in ("auto", "swap", "tflms") for link in (1.0, 0.5)]
    return (moving[0], Method("auto"), *(Method(each) for each in alone), *moving[1:])


def floor_of(step: AheadStep, method: Method) -> int:
    """The least peak of any plan of the method's class, what is resident included; proven."""
    floor = floor_with_tiers(step.program, CARD.links) if method.tiers else floor_bytes(step.program)
    return step.resident_bytes + floor[0]


def verdict(found: Planned, floor: int, budget_bytes: int, most_overhead: float | None) -> str:
    """Whether a target is reached, and if not, whether a proof forbids it (definition 4)."""
    if floor > budget_bytes:
        return f"forbidden: floor {floor / MB:.0f} MB"
    bound = found.answer.bound
    if most_overhead is not None and bound is not None and bound > most_overhead:
        return f"forbidden: bound {bound:.2%}"
    if found.overhead is None:
        return f"missed: {found.answer.status.name}"
    if most_overhead is not None and found.overhead > most_overhead:
        return f"missed: {found.overhead:.2%}"
    return "reached"


def plan_columns(found: Planned, batch: int) -> dict[str, Any]:
    """A plan at the target."""
    percent = None if found.overhead is None else 100 * found.overhead
    columns = {
        "overhead_percent": percent,
        "bound_percent": None if found.answer.bound is None else 100 * found.answer.bound,
        "peak_mb": None if found.overhead is None else found.peak_bytes / MB,
        "samples_per_second": None if found.overhead is None else batch / found.seconds,
        "status": found.answer.status.name,
    }
    return columns


def _largest(batched: Batched, method: Method, cell: Published, there: Planned) -> tuple[int, Planned | None]:
    """Definition 3, and the plan there; ``there`` is the one at the target."""
    plans = {cell.reached: there}

    def fits(batch: int) -> bool:
        if batch not in plans:
            step = batched.at(batch)
            if floor_of(step, method) > CARD.memory_bytes:
                return False
            plans[batch] = method.plan(step, CARD.memory_bytes, enough=MOST_OVERHEAD)
        overhead = plans[batch].overhead
        return overhead is not None and overhead <= MOST_OVERHEAD

    finer = 2 if method == DEFAULT else 1
    guess = cell.reached if method == DEFAULT else max(cell.without or 1, 1)
    found = largest(fits, guess, max(cell.reached // (finer * COARSE), 1))
    return found, plans.get(found)


def batched_of(cell: Published) -> Batched:
    """The steps of a cell (definition 1)."""
    assert cell.without is not None
    return Batched(cell.make, CARD, (cell.without, cell.reached))


def batch_rows(
    question: str,
    case: str,
    cell: Published,
    batched: Batched,
    against: tuple[Method, ...],
    most_overhead: float | None,
) -> Iterator[Row]:
    """A row of keep-all and one per method.

    Args:
        question: of the rows.
        case: of the rows.
        cell: what was published.
        batched: its steps.
        against: the methods.
        most_overhead: at the target; ``None`` allows any.
    """
    yield _kept(question, case, cell, batched)
    step = batched.at(cell.reached)
    ops = len(step.program.ops)
    for method in against:
        floor = floor_of(step, method)
        found = method.plan(step, CARD.memory_bytes)
        batch, there = _largest(batched, method, cell, found) if method.searches(ops) else (None, None)
        outcome = verdict(found, floor, CARD.memory_bytes, most_overhead)
        checks: tuple[Check, ...] = ()
        if method == DEFAULT and outcome.startswith("forbidden"):
            checks = (holds(f"batch {cell.reached} is reached or forbidden by a proof", value=True),)
        elif method == DEFAULT:
            reached = cell.reached if outcome == "reached" else batch or 0
            checks = (at_least(f"batch{_within(most_overhead)}", reached, cell.reached),)
        columns = {
            "case": case,
            "method": method.label,
            "size": cell.size,
            "ops": ops,
            "their_batch": cell.without,
            "target_batch": cell.reached,
            "at_target": outcome,
            **plan_columns(found, cell.reached),
            "floor_mb": floor / MB,
            "largest_at_10_percent": batch,
            "samples_per_second_there": None if there is None or batch is None else batch / there.seconds,
            "plan_cpu_seconds": found.cpu_seconds,
        }
        yield Row(question, columns, checks)


def _within(most_overhead: float | None) -> str:
    return "" if most_overhead is None else f" at {most_overhead:.0%}"


def _kept(question: str, case: str, cell: Published, batched: Batched) -> Row:
    """The unplanned step, whose batch the sizes were fitted to."""
    assert cell.without is not None
    batch = batched.unplanned(CARD.memory_bytes, cell.without)
    step = batched.at(batch)
    columns = {
        "case": case,
        "method": "keep_all",
        "size": cell.size,
        "ops": len(step.program.ops),
        "their_batch": cell.without,
        "target_batch": cell.reached,
        "at_target": "",
        "overhead_percent": 0.0,
        "bound_percent": 0.0,
        "peak_mb": unplanned_peak(batched.at(cell.reached)) / MB,
        "samples_per_second": cell.reached / batched.at(cell.reached).program.seconds,
        "status": "",
        "floor_mb": None,
        "largest_at_10_percent": batch,
        "samples_per_second_there": batch / step.program.seconds,
        "plan_cpu_seconds": None,
        "capture_cpu_seconds": sum(batched.capture_seconds.values()),
    }
    off = abs(batch / cell.without - 1.0)
    return Row(question, columns, (at_most("keep-all's batch, off theirs by", off, TOLERANCE),))

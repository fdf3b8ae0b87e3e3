"""The largest batch, length or number of layers that fits a budget, by prediction: nothing runs or runs out of memory.

1. A batch *fits* if a plan within the budget exists whose overhead is within the limit.
2. Two small captures give a guess (``batches``). It is captured, which corrects the next guess.
3. The answer is captured as it is, and so is the next larger batch. Where interpolation was wrong, the search goes on
   with captures.
4. Where ops change, as with the number of layers, all that is asked is captured. The first to ask are where straight
   lines through the unplanned peaks and through the floors of two small captures meet the budget.

5. A size that ``make_case`` raises for does not fit; what was found below it stays. For 1 the error is the caller's.

Everything that is said of a batch here holds for what else is varied. Assumes that a batch fits if a larger one does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast

from ebbtide._api.batches import interpolated, judged, largest, one_forward
from ebbtide._api.estimate import AheadStep, capture_ahead
from ebbtide.capture.without_memory import without_memory
from ebbtide.case import Case
from ebbtide.entry_points import options_of, takes_options
from ebbtide.errors import BudgetError, UsageError
from ebbtide.options import Options
from ebbtide.planners import Interrupt, Progress, planner_named
from ebbtide.planners.base import silent
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.narration import interruption_noted, narrated
from ebbtide.planning.pipeline import PlanningOptions
from ebbtide.report.plan import Plan
from ebbtide.signals import raised_by_a_handler
from ebbtide.step.machine import Machine, is_elsewhere
from ebbtide.step.program import Program
from ebbtide.step.resident_in_words import parts_of
from ebbtide.units import Budget, format_allowed, format_percent

__all__ = ["BatchPlan", "Vary", "max_batch"]

Vary = Literal["batch", "layers", "length"]

WORDS = {"batch": "a batch of 1", "layers": "1 layer", "length": "a length of 1"}
"""What may be varied, and the least of each in words."""
MOST_OVERHEAD = 10.0  # a fraction: beyond, a percentage was meant
SEARCH_EFFORT = 2_000  # per plan while searching; the answer is planned with all
COARSE = 64  # a first guess is off by up to this part of the batch: its costs are those of small batches
CORRECTIONS = 3  # of a guess, by a capture each
LAST_SECONDS = (
    10.0  # for the plan of what is at hand, once Ctrl-C has come; it starts from one for nearly the same step
)


@dataclass(frozen=True)
class BatchPlan:
    """The largest batch found, or whatever else was varied.

    Attributes:
        batch: the largest that fits, 1 or more: as many layers, or tokens, if those were varied.
        plan: of that batch.
        unplanned_batch: the largest whose unplanned step fits; 0 if not even one does.
        overhead_limit: largest overhead allowed at that batch, a fraction; ``None`` if any was.
        captured: every batch that was captured to be judged, ascending, and whether it fits.
        vary: what was varied.
        failed: every batch that ``make_case`` raised for, ascending, and what it raised, as text.
    """

    batch: int
    plan: Plan
    unplanned_batch: int
    overhead_limit: float | None
    captured: tuple[tuple[int, bool], ...]
    vary: Vary = "batch"
    failed: tuple[tuple[int, str], ...] = ()


@takes_options
def max_batch(
    make_case: Callable[[int], Case],
    *,
    budget: str | int | Budget,
    vary: Vary = "batch",
    overhead: float | Literal["one-forward"] | None = None,
    machine: str | Machine | None = None,
    options: Options | None = None,
) -> BatchPlan:
    """The largest batch whose training step fits ``budget``; the most layers or the greatest length, if they vary.

    Args:
        make_case: from a batch to the case of one training call; or from a number of layers, or a length. For a
            machine that is not at hand it is called under ``FakeTensorMode``, so that no batch takes memory.
        budget: bytes of the step's peak, resident part included; a share is refused, as the peak it would be of
            grows with the batch.
        vary: what ``make_case`` takes, ``"batch"``, ``"layers"`` or ``"length"``: the word for it in what is said.
        overhead: the most added time allowed, as a fraction of the unplanned step; ``"one-forward"`` is the share
            of the forward; ``None`` allows any.
        machine: as in :class:`Options`.
        options: all else; what they leave open of a step is what each case says, an ``optimizer`` is a function that
            makes that of each case's model, and the time limit is of each plan.

    Raises:
        UsageError: for an argument that is none of what is said above, naming it and what it takes.
        BudgetError: if not even a batch (a number of layers, a length) of 1 fits, with the least budget for it.
        CaptureError: if a call is not one graph.

    What ``make_case`` raises for 1 is raised; a larger one that it raises for does not fit (``BatchPlan.failed``).
    """
    parsed = Budget.parse(budget)
    if parsed.bytes is None:
        raise UsageError(
            f"a budget of {parsed} says nothing about a batch; give bytes, for example budget='16GiB'",
            argument="budget",
            value=budget,
        )
    _check_limit(overhead)
    if not isinstance(vary, str) or vary not in WORDS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"vary={vary!r} is none of {', '.join(WORDS)}", argument="vary", value=vary, accepted=tuple(WORDS)
        )
    _refuse_no_factory(make_case)
    asked = options_of("max_batch", options, machine=machine)
    if asked.optimizer is not None and not callable(asked.optimizer):
        raise UsageError(
            "every batch has a model of its own, so max_batch takes no optimizer that is made already; give a "
            "function that makes it: optimizer=lambda model: torch.optim.AdamW(model.parameters())",
            argument="optimizer",
            value=asked.optimizer,
        )
    planner_named(asked.planner)
    asked.require_tiers_for(asked.planner)
    with narrated(asked.tell), interruption_noted(asked.tell) as tell:
        search = _Search(make_case, parsed, overhead, replace(asked, progress=tell), vary)
        batch = search.run()
        if batch == 0:
            raise search.refusal()
        of_batch = search.step(batch)
        plan = search.best_plan(of_batch, batch)
    failed = tuple(sorted(search.failed.items()))
    return BatchPlan(batch, plan, search.unplanned, search.limit(of_batch.program), search.captures, vary, failed)


def _refuse_no_factory(make_case: object) -> None:
    """Refuse what makes no cases; a module is callable too, and takes no batch but its inputs."""
    import torch

    of_module = isinstance(getattr(make_case, "__self__", None), torch.nn.Module)
    if callable(make_case) and not isinstance(make_case, torch.nn.Module) and not of_module:
        return
    raise UsageError(
        "make_case is a function from a batch, or what else varies, to an ebbtide.Case, not "
        f"{type(make_case).__name__}{' of a module' if of_module else ''}: "
        "max_batch(lambda batch: ebbtide.Case(model, (inputs(batch),)), budget=...)",
        argument="make_case",
        value=make_case,
    )


def _check_limit(overhead: object) -> None:
    if overhead is None or overhead == "one-forward":
        return
    if isinstance(overhead, bool) or not isinstance(overhead, float | int) or not overhead >= 0:
        raise UsageError(
            f"overhead {overhead!r} is not a limit; accepted: a fraction (0.3), 'one-forward' or None",
            argument="overhead",
            value=overhead,
            accepted=("a fraction", "'one-forward'", "None"),
        )
    if overhead > MOST_OVERHEAD:
        raise UsageError(
            f"overhead {overhead!r} would be {overhead:.0%} more time; it is a fraction: 0.3 means 30 %",
            argument="overhead",
            value=overhead,
        )


class _Interrupted(Exception):
    """Ctrl-C has come: what is asked from here on is not looked for."""


class _NotMade(Exception):
    """``make_case`` has raised for a size above 1: definition 5."""


class _Search:
    def __init__(
        self,
        make_case: Callable[[int], Case],
        budget: Budget,
        overhead: float | str | None,
        options: Options,
        vary: Vary,
    ) -> None:
        self._vary: Vary = vary
        self._make_case = make_case
        self._budget = budget
        self._overhead = overhead
        self._options = options
        self._progress = options.tell
        self._effort = min(options.effort, SEARCH_EFFORT)
        self._steps: dict[int, AheadStep] = {}
        self.plans: dict[int, Plan | None] = {}  # of batches that were captured to be judged
        self.failed: dict[int, str] = {}
        self.unplanned = 0
        self._fitted = 0  # the largest that had a plan, of a captured step or of one between
        self._plans: dict[int, Plan] = {}  # plans of all that had one

    @property
    def captures(self) -> tuple[tuple[int, bool], ...]:
        judged = ((batch, plan is not None) for batch, plan in sorted(self.plans.items()))
        return tuple((batch, fits) for batch, fits in judged if batch not in self.failed)

    def limit(self, program: Program) -> float | None:
        """The largest overhead allowed, as a fraction."""
        if self._overhead == "one-forward":
            return one_forward(program)
        return None if self._overhead is None else float(self._overhead)

    def step(self, batch: int) -> AheadStep:
        """The captured step of ``batch``."""
        if batch not in self._steps:
            self._progress(Progress(f"capturing {self._vary} {batch}"))
            case = self._inputs(batch)
            if not isinstance(case, Case):  # a user's function may return anything
                raise UsageError(f"make_case({batch}) returned {type(case).__name__}; return ebbtide.Case(model, args)")
            options = replace(self._options.for_case(case), progress=silent)
            self._steps[batch] = capture_ahead(case.model, case.args, case.kwargs, options=options, name=case.name)
        return self._steps[batch]

    def _inputs(self, batch: int) -> object:
        """What ``make_case`` gives for a batch.

        Raises:
            _NotMade: if it raises, for a batch above 1.
        """
        if batch in self.failed:
            raise _NotMade
        try:
            with without_memory() if is_elsewhere(self._options.target) else contextlib.nullcontext():
                return cast("object", self._make_case(batch))
        except Exception as error:
            if batch == 1 or raised_by_a_handler(error):
                raise
            self.failed[batch] = f"{type(error).__name__}: {error}"
            self._progress(Progress(f"{self._vary} {batch} cannot be made: {self.failed[batch]}"))
            raise _NotMade from error

    def plan_of(self, step: AheadStep, batch: int) -> Plan | None:
        """The plan of ``step``, if it is within budget and limit."""
        if self._interrupted:
            raise _Interrupted
        self._progress(Progress(f"planning {self._vary} {batch}" + (f"; {self._fitted} fits" if self._fitted else "")))
        plan = judged(step, self._budget, self.limit(step.program), self._planning(self._effort))
        if plan is None:
            if self._interrupted:  # which proves nothing
                raise _Interrupted
            return None
        self._plans[batch] = plan
        self._fitted = max(self._fitted, batch)
        self._progress(Progress(f"{self._vary} {batch} fits", best_overhead=plan.overhead))
        return plan

    def best_plan(self, step: AheadStep, batch: int) -> Plan:
        """The plan of a batch that fits, with all the effort, from the one that it was judged by."""
        known = self.plans[batch]
        assert known is not None
        self._progress(Progress(f"planning {self._vary} {batch}, the largest that fits"))
        best = step.plan(self._budget, self._planning(self._options.effort), seeds=[known.schedule])
        limit = self.limit(step.program)
        return best if limit is None or best.overhead <= limit else known

    def _planning(self, effort: int) -> PlanningOptions:
        return replace(PlanningOptions.of(self._options), effort=effort, progress=silent, takes_shares=False)

    def refusal(self) -> BudgetError:
        """Why not even a batch of 1 fits."""
        step = self.step(1)
        try:
            plan = step.plan(self._budget, self._planning(self._options.effort))
        except BudgetError as error:
            return error.told_as(f"not even {WORDS[self._vary]} fits: {error}")
        limit = self.limit(step.program)
        assert limit is not None, "without a limit a batch that has a plan fits"
        return BudgetError(
            f"not even {WORDS[self._vary]} fits: within {format_allowed(plan.budget_bytes)} it takes "
            f"{format_percent(plan.overhead)} more time, and at most {format_percent(limit)} is allowed. Ask for more "
            f"bytes ({step.unplanned_budget_bytes} need no recomputation), or allow more overhead",
            budget_bytes=plan.budget_bytes,
            floor_bytes=plan.floor_bytes,
            smallest_bytes=plan.smallest_bytes,
            resident_bytes=plan.resident_bytes,
            resident_parts=parts_of(plan.resident_parts, plan.resident_bytes),
            pinned_by=str(plan.program.ops[plan.floor_op]),
        )

    def _captured_fits(self, batch: int) -> bool:
        if batch not in self.plans:
            try:
                self.plans[batch] = self.plan_of(self.step(batch), batch)
            except _NotMade:
                self.plans[batch] = None
            if self.plans[batch] is None:  # what was interpolated may have been too much
                self._fitted = max((each for each, plan in self.plans.items() if plan is not None), default=0)
        return self.plans[batch] is not None

    @property
    def _interrupted(self) -> bool:
        """Whether Ctrl-C has come; a time limit is for each plan."""
        return self._options.interrupt is not None and self._options.interrupt.interrupted

    def run(self) -> int:
        """The largest batch that fits, or once it is interrupted the largest whose plan is at hand."""
        try:
            batch = self._run()
        except _Interrupted:
            batch = self._at_hand()
        self.unplanned = min(self.unplanned, batch) if self.failed else self.unplanned  # lines do not see what fails
        return batch

    def _at_hand(self) -> int:
        """The largest batch that was found to fit and, captured if it was not, does."""
        known_to_fit = set(self._plans) | ({self.unplanned} if self.unplanned else set[int]())
        for batch in sorted(known_to_fit, reverse=True):
            if self.plans.get(batch) is not None:
                return batch
            try:
                step, known = self.step(batch), self._plans.get(batch)
            except _NotMade:
                continue
            self._progress(Progress(f"planning {self._vary} {batch} from what is known"))
            options = replace(self._planning(self._effort), interrupt=Interrupt(LAST_SECONDS))
            seeds = [] if known is None else [known.schedule]
            self.plans[batch] = judged(step, self._budget, self.limit(step.program), options, seeds)
            if self.plans[batch] is not None:
                return batch
        tried = ", ".join(f"{batch} {'fits' if fits else 'does not fit'}" for batch, fits in self.captures)
        self._progress(Progress(f"looking for the largest {self._vary}; tried: {tried or 'none to its end'}"))
        raise KeyboardInterrupt

    def _run(self) -> int:
        try:
            between = interpolated(self.step(2), self.step(4))
        except _NotMade:  # too few to draw a line through
            batch = largest(self._captured_fits, 1)
            fitting = (each for each, step in self._steps.items() if self._unplanned_fits(step))
            self.unplanned = max(fitting, default=0)
            return batch
        if between is None:
            return self._run_by_captures()
        at = between
        self.unplanned = largest(lambda batch: self._unplanned_fits(at(batch)))
        near = self._overhead is None  # sizes are affine in the batch, seconds only nearly
        guess = self._guess(between, max(self.unplanned, 1), near=near)
        for _ in range(CORRECTIONS):
            if between is None or guess <= 2 or guess in self.plans:
                break
            self._captured_fits(guess)
            if guess in self.failed:
                break
            between = interpolated(self.step(2), self.step(guess), (2, guess))
            guess = guess if between is None else self._guess(between, guess, near=True)
        return largest(self._captured_fits, max(guess, 1))

    def _run_by_captures(self) -> int:
        """Where ops change with what is varied (definition 4)."""
        unplanned = self._where_a_line_ends(lambda step: step.unplanned_budget_bytes)
        self.unplanned = largest(self._made_fits_unplanned, unplanned)
        if self._overhead is not None:
            return largest(self._captured_fits, max(self.unplanned, 1))
        at_floor = self._where_a_line_ends(lambda step: step.resident_bytes + floor_bytes(step.program)[0])
        guess = max(at_floor, self.unplanned, 1)
        return largest(self._captured_fits, max(largest(self._captured_fits, guess, max(guess // COARSE, 1)), 1))

    def _made_fits_unplanned(self, batch: int) -> bool:
        try:
            return self._unplanned_fits(self.step(batch))
        except _NotMade:
            return False

    def _where_a_line_ends(self, size: Callable[[AheadStep], int]) -> int:
        """Where a straight line through the sizes of the two small captures meets the budget; 1 or more."""
        assert self._budget.bytes is not None
        low, high = size(self.step(2)), size(self.step(4))
        if high <= low:
            return 1
        return max(int(2 + 2 * (self._budget.bytes - low) / (high - low)), 1)

    def _guess(self, ahead: Callable[[int], AheadStep], start: int, *, near: bool) -> int:
        """The largest batch that fits by interpolation, looked for from ``start``; about, unless it is ``near``."""
        coarse = 1 if near else max(start // COARSE, 1)
        return largest(lambda batch: self.plan_of(ahead(batch), batch) is not None, start, coarse)

    def _unplanned_fits(self, step: AheadStep) -> bool:
        assert self._budget.bytes is not None
        return step.unplanned_budget_bytes <= self._budget.bytes

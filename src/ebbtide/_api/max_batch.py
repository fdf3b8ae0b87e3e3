"""The largest batch, length or number of layers that fits a budget, by prediction: nothing runs or runs out of memory.

1. A batch *fits* if a plan within the budget exists whose overhead is within the limit.
2. The first to be asked are where straight lines through what two captures take meet the budget: through their
   unplanned peaks, and through the least budgets that they have plans for.
3. All that is asked is captured: the answer fits, and the next larger one does not.
4. A size that ``make_case`` raises for does not fit; what was found below it stays. For 1 the error is the caller's.

Everything that is said of a batch here holds for what else is varied. Assumes that a batch fits if a larger one does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast

from ebbtide._api.auto_budget import AUTO, budget_from
from ebbtide._api.batches import judged, largest, one_forward
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
from ebbtide.torch_seams import trees as pytree
from ebbtide.units import Budget, format_allowed, format_percent

__all__ = ["BatchPlan", "Vary", "max_batch"]

Vary = Literal["batch", "layers", "length"]

WORDS = {"batch": "a batch of 1", "layers": "1 layer", "length": "a length of 1"}
"""What may be varied, and the least of each in words."""
MOST_OVERHEAD = 10.0  # a fraction: beyond, a percentage was meant
NEAR, FAR = 2, 4  # the two small captures
LOOSE = 0.5  # of overhead: a limit below it gives no line
COARSE = 8  # the first steps from what fits unplanned are so large a part of it then
BEYOND = 4  # times what fits unplanned: a guess is no larger, and goes on from there
APART = 100  # times: a size so much larger that gives the same step was not looked at
SEARCH_EFFORT = 2_000  # per plan while searching; the answer is planned with all
LAST_SECONDS = 10.0  # for the plan of what fits unplanned, once Ctrl-C has come


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
    budget: str | int | Budget = AUTO,
    vary: Vary = "batch",
    overhead: float | Literal["one-forward"] | None = None,
    machine: str | Machine | None = None,
    options: Options | None = None,
) -> BatchPlan:
    """The largest batch whose training step fits ``budget``; the most layers or the greatest length, if they vary.

    Args:
        make_case: from a batch to the case of one training call; or from a number of layers, or a length. For a
            machine that is not at hand it is called under ``FakeTensorMode``, so that no batch takes memory.
        budget: bytes of the step's peak, resident part included, or ``"auto"``; a share is refused, as the peak it
            would be of grows with the batch.
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
    asked = options_of("max_batch", options, machine=machine)
    parsed = budget_from(budget, machine=asked.target)
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
    """``make_case`` has raised for a size above 1: definition 4."""


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
        self._seen: dict[object, int] = {}  # sizes by what they made
        self.plans: dict[int, Plan | None] = {}  # of batches that were captured to be judged
        self.failed: dict[int, str] = {}
        self.unplanned = 0

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
            self._refuse_no_change(batch, case)
        return self._steps[batch]

    def _refuse_no_change(self, batch: int, case: Case) -> None:
        """Refuse a function that makes the same step whatever it is given: every size would fit."""
        inputs = pytree.tree_leaves([case.args, case.kwargs])
        same = (self._steps[batch].program.fingerprint, str([getattr(each, "shape", each) for each in inputs]))
        other = self._seen.setdefault(same, batch)
        if batch > APART * other:  # sizes near each other may be rounded to one
            raise UsageError(
                f"make_case has to make inputs of the {self._vary} that it is given: {other} and {batch} gave the same "
                "step, with inputs of the same shapes",
                argument="make_case",
                value=self._make_case,
            )

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

    @property
    def _fitted(self) -> int:
        """The largest that has a plan; 0 if none has."""
        return max((batch for batch, plan in self.plans.items() if plan is not None), default=0)

    def _plan_of(self, batch: int) -> Plan | None:
        """The plan of ``batch``, if it is within budget and limit.

        Raises:
            _NotMade: if the case cannot be made.
        """
        step, fitted = self.step(batch), self._fitted
        if self._interrupted:
            raise _Interrupted
        self._progress(Progress(f"planning {self._vary} {batch}" + (f"; {fitted} fits" if fitted else "")))
        plan = judged(step, self._budget, self.limit(step.program), self._planning(self._effort))
        if plan is not None:
            self._progress(Progress(f"{self._vary} {batch} fits", best_overhead=plan.overhead))
        elif self._interrupted:  # which proves nothing
            raise _Interrupted
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
            return error.because(f"not even {WORDS[self._vary]} fits: {error.reason}")
        limit = self.limit(step.program)
        assert limit is not None, "without a limit a batch that has a plan fits"
        return BudgetError(
            f"not even {WORDS[self._vary]} fits: within {format_allowed(plan.budget_bytes)} it takes "
            f"{format_percent(plan.overhead)} more time, and at most {format_percent(limit)} is allowed",
            remedy=f"ask for more bytes ({step.unplanned_budget_bytes} need no recomputation), or allow more overhead",
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
                self.plans[batch] = self._plan_of(batch)
            except _NotMade:
                self.plans[batch] = None
        return self.plans[batch] is not None

    @property
    def _interrupted(self) -> bool:
        """Whether Ctrl-C has come; a time limit is for each plan."""
        return self._options.interrupt is not None and self._options.interrupt.interrupted

    def run(self) -> int:
        """The largest batch that fits, or once it is interrupted the largest whose plan is at hand."""
        try:
            self.unplanned = largest(
                self._fits_unplanned, self._where_a_line_ends(lambda step: step.unplanned_budget_bytes)
            )
            guess, coarse = max(self.unplanned, 1), 1
            if self._overhead is None or (self._overhead != "one-forward" and float(self._overhead) >= LOOSE):
                most = BEYOND * guess  # where weights are nearly all, least bytes hardly grow between small batches
                guess = max(guess, min(self._where_a_line_ends(self._least_bytes), most))
                if guess > FAR:
                    guess = max(self.unplanned, min(self._where_a_line_ends(self._least_bytes, guess), most))
            else:
                coarse = max(guess // COARSE, 1)
            return largest(self._captured_fits, max(largest(self._captured_fits, guess, coarse), 1))
        except _Interrupted:
            return self._at_hand()

    def _at_hand(self) -> int:
        """The largest batch that was found to fit."""
        if self.unplanned > self._fitted:
            batch = self.unplanned
            self._progress(Progress(f"planning {self._vary} {batch} from what is known"))
            step, options = self.step(batch), replace(self._planning(self._effort), interrupt=Interrupt(LAST_SECONDS))
            self.plans[batch] = judged(step, self._budget, self.limit(step.program), options)
        if batch := self._fitted:
            return batch
        tried = ", ".join(f"{batch} {'fits' if fits else 'does not fit'}" for batch, fits in self.captures)
        self._progress(Progress(f"looking for the largest {self._vary}; tried: {tried or 'none to its end'}"))
        raise KeyboardInterrupt

    def _fits_unplanned(self, batch: int) -> bool:
        assert self._budget.bytes is not None
        try:
            return self.step(batch).unplanned_budget_bytes <= self._budget.bytes
        except _NotMade:
            return False

    def _least_bytes(self, step: AheadStep) -> int:
        """The least budget that a plan of ``step`` was found for, or that no plan stays below."""
        if self._interrupted:
            raise _Interrupted
        try:
            return step.plan(Budget(bytes=1), self._planning(self._effort)).budget_bytes
        except BudgetError as error:
            return error.smallest_bytes or step.resident_bytes + floor_bytes(step.program)[0]

    def _where_a_line_ends(self, size: Callable[[AheadStep], int], far: int = FAR) -> int:
        """Where a straight line through the sizes of a small step and of one at ``far`` meets the budget, 1 or more.

        That is at ``far`` if there is no such line.
        """
        assert self._budget.bytes is not None
        try:
            low, high = size(self.step(NEAR)), size(self.step(far))
        except _NotMade:
            return far
        if high <= low:
            return far
        return max(int(NEAR + (far - NEAR) * (self._budget.bytes - low) / (high - low)), 1)

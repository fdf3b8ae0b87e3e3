"""How a model was fitted, and what was asked of it since: two records that nobody writes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ebbtide.planning.pipeline import PlanningOptions
from ebbtide.report.plan import Plan
from ebbtide.transfers.paths import TransferPath
from ebbtide.units import Budget

__all__ = ["Configuration", "Request"]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """How a model was fitted. It is replaced as a whole or not at all.

    Attributes:
        planning: how to plan.
        verify: whether first steps are proven and later ones measured, or every step proven.
        every_output: whether outputs beside a scalar loss take gradients too.
        start: a plan from whose schedule searches start too, made anywhere.
        rewrites: names of the rules by which parts of its steps may be replaced by what has the same bits.
        first_rewrites: of these, those that are tried before the others; all if ``None``.
        tiers: by name, those that plans may move buffers to.
        gradients_stay: whether gradients are there when a call begins, and may be cleared before its backward, as
            Lightning's trainer does: room is kept for them from the first call on, and no plan counts on them.
        on_violation: what follows where a step goes over its budget.
        in_pieces: whether a call that is not one graph is planned as several.
        advice: what of a trainer's would be planned, where one calls the model.
    """

    planning: PlanningOptions
    verify: bool | Literal["always"]
    every_output: bool
    start: Plan | None = None
    rewrites: tuple[str, ...] = ()
    first_rewrites: tuple[str, ...] | None = None
    tiers: Mapping[str, TransferPath] = field(default_factory=dict[str, TransferPath])
    gradients_stay: bool = False
    on_violation: Literal["replan", "raise"] = "replan"
    in_pieces: bool = False
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of every step of a model. Plans that were made for an earlier request do not hold.

    Attributes:
        budget: of every step.
        given_plan: the plan to run, if the user gave one.
        number: of requests before this one.
        changes: what was set since the first, in words, with the number of the last request that set it.
    """

    budget: Budget
    given_plan: Plan | None = None
    number: int = 0
    changes: Mapping[str, int] = field(default_factory=dict[str, int])

    def with_budget(self, budget: Budget, plan: Plan | None) -> Request:
        """The request for another budget, or to run a plan."""
        return self._next("another budget was set" if plan is None else "a plan was given", budget, plan)

    def with_optimizer(self) -> Request:
        """The request to plan for another optimizer."""
        return self._next("another optimizer was set", self.budget, self.given_plan)

    def changed_since(self, number: int) -> str:
        """What was set after the request of that number, for people."""
        return " and ".join(text for text, last in self.changes.items() if last > number)

    def _next(self, change: str, budget: Budget, plan: Plan | None) -> Request:
        return Request(budget, plan, self.number + 1, {**self.changes, change: self.number + 1})

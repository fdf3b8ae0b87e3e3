"""What is asked of a planner: how to plan, and a step's budget with what stands beside its program.

It is the same for every program that a step may be run by; :mod:`~ebbtide.planning.one_program` answers it for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ebbtide.errors import UsageError
from ebbtide.options import Options
from ebbtide.planners import Interrupt, Problem, Progress
from ebbtide.planners.base import DEFAULT_EFFORT, silent
from ebbtide.planners.registry import moves_buffers
from ebbtide.planning.alternatives import Alternatives
from ebbtide.planning.cache import PlanCache
from ebbtide.planning.shape_plans import Buckets
from ebbtide.planning.step_end import NOTHING_AFTER, StepEnd
from ebbtide.report.plan import Plan
from ebbtide.step.machine import Link, Machine
from ebbtide.step.program import Program
from ebbtide.step.provenance import Provenance
from ebbtide.step.rewrite import Rewritten
from ebbtide.step.schedule import Schedule
from ebbtide.units import Budget

__all__ = ["DEFAULT_EFFORT", "QUICK_EFFORT", "Asked", "Made", "PlanningOptions"]

QUICK_EFFORT = 2_000
"""Local-search moves of a plan that is to be found quickly: a tenth of the default's, and of its solvers' work."""


@dataclass(eq=False)
class Made:
    """What is made on the way to a plan.

    Attributes:
        plans: of each program that was tried one, not the best of them alone.
        choose: keeps for the next start by which rewrites the best plan came about.
    """

    plans: list[Plan] = field(default_factory=list[Plan])
    choose: Callable[[Plan], None] = lambda _: None


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """How to plan."""

    planner: str = "auto"
    """Name of the planner."""
    effort: int = DEFAULT_EFFORT
    """Local-search moves; plans are reproducible for one effort and seed."""
    seed: int = 0
    """Of every random choice."""
    time_limit_seconds: float | None = None
    """Cuts planning off; the plan then says ``TIME_LIMIT``."""
    machine: Machine | None = None
    """For transfers; planners that only recompute ignore it."""
    tiers: tuple[str, ...] = ()
    """That buffers may be moved to, the preferred one first; planners that only recompute ignore them."""
    interrupt: Interrupt | None = None
    """Set by Ctrl-C; the best plan so far is kept."""
    progress: Callable[[Progress], None] = field(default=silent)
    """Called with what is known while planning."""
    provenance: Provenance = field(default_factory=Provenance)
    """What is known of where the program comes from, to be kept in the plan."""
    resident_parts: Mapping[str, int] = field(default_factory=dict[str, int])
    """What is resident by kind, where that is known; likewise."""
    cache: PlanCache | None = None
    """Where answers are kept, and start points taken from; ``None`` plans anew, from the given seeds alone."""
    buckets: Buckets | None = None
    """What was searched for other shapes of the same model, for the planners ``auto`` and ``least_memory``."""

    alternatives: Alternatives | None = None
    """Other programs for the same step, for the planners of :data:`REWRITE`."""
    rewritten: Rewritten | None = None
    """How the program at hand comes from the captured one, if it is another; without ``alternatives``."""
    other_plans: Sequence[Plan] = ()
    """Plans of the step that are at hand: those of an alternative's own program are start points of it."""

    known_smallest_bytes: int = 0
    """Below which a budget was refused for what no program shows: a refusal names no less."""
    quick: bool = False
    """Whether what is found quickly will do: with :data:`QUICK_EFFORT`, and no search for the smallest budget.

    Only where nothing is found so, everything is searched: a refusal names the smallest budget."""
    plan_only: bool = False
    """Whether the smallest budget is looked for only where there is no plan; :func:`one_program.with_smallest` does it
    for the best of several."""
    made: Made | None = None
    """Takes every plan that is made on the way."""
    takes_shares: bool = True
    """Whether a refusal may advise a share: for one caller a budget is always in bytes."""
    takes_inside: Callable[[], bool] = field(default=lambda: True)
    """Whether it may advise to have the optimizer step in the backward, which not every optimizer or trainer can."""

    @staticmethod
    def of(options: Options) -> PlanningOptions:
        """The part of ``options`` that planning a captured step needs."""
        return PlanningOptions(
            planner=options.planner,
            effort=options.effort,
            seed=options.seed,
            time_limit_seconds=options.time_limit,
            machine=options.target,
            interrupt=options.interrupt,
            progress=options.tell,
        )

    @property
    def links(self) -> Mapping[str, Link]:
        """To the tiers that plans may move buffers to."""
        there = {} if self.machine is None else self.machine.links
        return {tier: there[tier] for tier in self.tiers if tier in there} if moves_buffers(self.planner) else {}

    def with_tiers(self) -> PlanningOptions:
        """With the tiers that the planner uses; what other shapes have told is of plans that move nothing.

        Raises:
            UsageError: for a tier to which the machine has no link.
        """
        if not self.tiers or not moves_buffers(self.planner):
            return replace(self, tiers=())
        there = {} if self.machine is None else self.machine.links
        for tier in self.tiers:
            if tier not in there:
                name = "none is given" if self.machine is None else f"{self.machine.name!r} has none"
                raise UsageError(
                    f"moving buffers needs a machine with a link to tier {tier!r}; {name}; "
                    f"accepted: {', '.join(sorted(there)) or 'no tier'}",
                    argument="tiers",
                    value=tier,
                    accepted=tuple(sorted(there)),
                )
        return replace(self, buckets=None)

    def problem(self, program: Program, above_budget_bytes: int, seeds: Sequence[Schedule] = ()) -> Problem:
        """To plan ``program`` within so many bytes above the step's start; these are options :meth:`with_tiers`."""
        return Problem(
            program=program,
            above_budget_bytes=above_budget_bytes,
            machine=self.machine,
            effort=self.effort,
            seed=self.seed,
            seeds=tuple(seeds),
            tiers=self.tiers,
        )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a plan is asked for; the attributes are the arguments of :func:`~ebbtide.planning.pipeline.make_plan`."""

    budget: Budget
    resident_bytes: int
    reserve_bytes: int = 0
    end: StepEnd = NOTHING_AFTER
    seeds: Sequence[Schedule] = ()
    options: PlanningOptions = field(default_factory=PlanningOptions)

    @property
    def held_bytes(self) -> int:
        """Of any budget, what no plan can use."""
        return self.resident_bytes + self.reserve_bytes

    def budget_bytes(self, program: Program) -> int:
        """The budget, for a step of ``program``."""
        return self.end.budget_bytes(self.budget, program, self.resident_bytes, self.reserve_bytes)

    def budget_for(self, program: Program, above_bytes: int) -> int:
        """The least budget of a plan that takes so many bytes above the step's start."""
        return max(self.end.needed_bytes(program, self.resident_bytes), self.held_bytes + above_bytes)

"""What is known of one fitted model, in parts that have one writer each.

- its *configuration* and the current *request* are records that nobody writes to (``configuration``);
- its captured *steps* are written by captures and by the loop (``captured_steps``);
- what its runs have *learned* of the code around them is written when a step ends (``learned``), by its *judge*
  (``judging``);
- its *optimizers* are written by those who tell of one and by hooks at their steps (``optimizer_link``);
- its *refinements* are better plans that are looked for beside training (``refinement``);
- its *pending steps* are forwards whose backward has not come (``pending_steps``).

Functions take the part that they need. Only the loop (``loop``) sees the whole.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

from ebbtide.engine.call_context import CallContext, observe
from ebbtide.engine.calls import Calls
from ebbtide.engine.captured_steps import CapturedSteps
from ebbtide.engine.compiled import Call
from ebbtide.engine.configuration import Configuration, Request
from ebbtide.engine.gradient_watcher import GradientWatcher
from ebbtide.engine.in_pieces import StepInPieces
from ebbtide.engine.judging import Judge
from ebbtide.engine.key import Code
from ebbtide.engine.learned import Learned
from ebbtide.engine.optimizer_link import OptimizerLink
from ebbtide.engine.pending_steps import PendingSteps
from ebbtide.engine.refinement import Refinements
from ebbtide.engine.step import Step
from ebbtide.report.plan import Plan
from ebbtide.units import Budget

__all__ = ["FittedModel"]

_numbers = itertools.count(1)


@dataclass(kw_only=True, eq=False)
class FittedModel:
    """One fitted model.

    Attributes:
        plain_class: the model's own class.
        configuration: how it was fitted.
        request: what is asked of its steps.
        optimizers: that train it.
        calls: how its calls went.
        number: of the model among all that were ever fitted.
        steps: that are captured.
        learned: from runs.
        judge: of its steps' bytes.
        pending: forwards whose backward has not come.
        gradient_watcher: of gradients at its parameters.
        code: the functions of its classes.
        refinements: better plans that are looked for beside training.
        in_pieces: steps that are several graphs, by the modes of their calls.
        last: the step that ran last.
    """

    plain_class: type[torch.nn.Module]
    configuration: Configuration
    request: Request
    optimizers: OptimizerLink
    calls: Calls = field(default_factory=Calls)
    number: int = field(default_factory=_numbers.__next__)
    steps: CapturedSteps = field(init=False)
    learned: Learned = field(default_factory=Learned)
    judge: Judge = field(init=False)
    pending: PendingSteps = field(init=False)
    gradient_watcher: GradientWatcher = field(default_factory=GradientWatcher)
    code: Code = field(default_factory=Code)
    refinements: Refinements = field(default_factory=Refinements)
    in_pieces: dict[object, StepInPieces] = field(default_factory=dict[object, StepInPieces])
    last: Step | StepInPieces | None = None

    def __post_init__(self) -> None:
        self.judge = Judge(self.learned)
        self.pending = PendingSteps(self.learned.windows)
        self.steps = CapturedSteps(name=self.plain_class.__name__, configuration=self.configuration)

    def configure(self, configuration: Configuration) -> None:
        """Fit the model in another way from the next call on."""
        self.configuration = self.steps.configuration = configuration

    def set_budget(self, budget: Budget, plan: Plan | None) -> None:
        """Plan for another budget, or run another plan, from the next call on. What is captured stays."""
        self._ask(self.request.with_budget(budget, plan))

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Plan for the state of another optimizer, from the next call on. What is captured stays.

        Raises:
            UsageError: if the one that it replaces has updated weights inside of a backward, and has not stepped yet.
        """
        if self.optimizers.declare(optimizer):
            self._ask(self.request.with_optimizer())

    def _ask(self, request: Request) -> None:
        """Also plans that another thread is making do not hold: they are of what was asked for before."""
        self.request = request
        self.steps.forget_plans()
        self.refinements.end()

    def observe(self, call: Call) -> CallContext:
        """What surrounds ``call``."""
        return observe(
            call,
            number=self.number,
            code=self.code,
            siblings=self.pending,
            windows=self.learned.windows,
            optimizers=self.optimizers.all,
            gradients_stay=self.configuration.gradients_stay,
            updates=self.optimizers.updates_in_backward,
        )

"""Lightning's ``Trainer``: a callback that keeps every training step within a budget.

1. The loss methods of the LightningModule (``lightning_steps``) are fitted when training begins: the model is on its
   device, and the optimizers are there. They are plain methods again when training ends, by an exception too.
2. In automatic optimization that is ``training_step``. In manual optimization ``training_step`` has backwards and
   steps of optimizers in it and is no step that could be planned: the methods that compute its losses are named, and
   each of their calls, to the end of its backward, is a step.
3. What would have the model run past the plan, or spreads it, is refused by name before the first step.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ebbflow._api.fit import calls_of, fit, step_of, unfit
from ebbflow.engine.calls import Calls
from ebbflow.engine.fitted_class import FITTED
from ebbflow.errors import UsageError
from ebbflow.integrations.options import check
from ebbflow.measurement.together import Together
from ebbflow.names import did_you_mean
from ebbflow.step.plan import Plan
from ebbflow.units import Budget

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from ebbflow.integrations.lightning_steps import TRAINING_STEP, Losses
except ImportError as error:
    raise ImportError("ebbflow.integrations.lightning needs lightning: pip install 'ebbflow[lightning]'") from error

__all__ = ["MemoryBudget"]


class MemoryBudget(Callback):
    """Keeps every training step of a ``lightning.pytorch.Trainer`` within ``budget``.

    ``Trainer(..., callbacks=[MemoryBudget("20GiB")])``

    Args:
        budget: as for :func:`ebbflow.fit`.
        losses: in manual optimization, the names of the methods of the LightningModule whose results
            ``manual_backward`` is called on.
        options: of :func:`ebbflow.fit` but ``optimizer``, which is the trainer's.

    Attributes:
        calls: how the training calls went, once training has ended (:func:`ebbflow.calls_of`).
        plan: the plan of the step that ran last then.

    Raises:
        UsageError: for a budget that is none, for an ``optimizer``, or for an option that there is not.
    """

    def __init__(self, budget: str | int | Budget | Plan, *, losses: Sequence[str] = (), **options: Any) -> None:
        check(budget, options)
        self.calls: Calls | None = None
        self.plan: Plan | None = None
        self._budget, self._options = budget, options
        self._losses = (losses,) if isinstance(losses, str) else tuple(losses)
        self._fitted: Losses | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be planned (definition 3).

        Raises:
            UsageError: for a trainer or a module whose steps cannot be planned.
        """
        if stage == "fit":
            self._release()  # the training before did not come to its end
            _refuse(trainer, pl_module)
            _refuse_methods(pl_module, self._losses)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit the loss methods (definition 1)."""
        losses = _losses_of(pl_module, self._losses or (TRAINING_STEP,))
        fit(losses, self._budget, optimizer=_optimizer_of(trainer.optimizers), **self._options)
        losses.install()
        self._fitted = losses

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was before (definition 1)."""
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Likewise."""
        self._release()

    def _release(self) -> None:
        losses, self._fitted = self._fitted, None
        if losses is None:
            return
        losses.remove()
        if losses in FITTED:
            step = step_of(losses)
            self.calls, self.plan = calls_of(losses), None if step is None else step.plan
            unfit(losses)


def _losses_of(module: LightningModule, names: Sequence[str]) -> Losses:
    """Under the module's own name, by which plans and errors call it."""
    kind = type(type(module).__name__, (Losses,), {"__module__": Losses.__module__, "__doc__": Losses.__doc__})
    return kind(module, names)


def _optimizer_of(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    """Whose state counts; Lightning has one without parameters where a module configures none."""
    real = [each for each in optimizers if any(group.get("params") for group in each.param_groups)]
    return None if not real else real[0] if len(real) == 1 else Together(real)


def _refuse(trainer: Trainer, module: LightningModule) -> None:
    """Definition 3.

    Raises:
        UsageError: naming what cannot be planned and what to do.
    """
    strategy = trainer.strategy
    compiled = getattr(module, "_compiler_ctx", None) is not None
    others = [each for each in trainer.callbacks if isinstance(each, MemoryBudget)]  # type: ignore[attr-defined]
    takes_iterator = "dataloader_iter" in inspect.signature(module.training_step).parameters
    reasons = {
        f"{trainer.world_size} processes: plans are not agreed on between them yet": trainer.world_size > 1,
        f"the strategy {type(strategy).__name__}: it wraps or spreads the model": not isinstance(
            strategy, SingleDeviceStrategy
        ),
        "a compiled LightningModule: a compiled model runs past the plan": compiled,
        "training_step(dataloader_iter): it fetches its batches itself, inside of the step": takes_iterator,
        f"{len(others)} budgets of one training": len(others) > 1,
    }
    for reason, there in reasons.items():
        if there:
            raise UsageError(
                f"MemoryBudget cannot plan for {reason}. Leave that out, or leave MemoryBudget out of the trainer's "
                "callbacks",
                argument="trainer",
                value=trainer,
            )


def _refuse_methods(module: LightningModule, names: Sequence[str]) -> None:
    """Definition 2.

    Raises:
        UsageError: for names of no methods, or none where they are needed.
    """
    kind = type(module).__name__
    if module.automatic_optimization and names:
        raise UsageError(
            f"losses={list(names)} names methods whose backward {kind} calls itself, and its optimization is "
            "automatic: its training_step is planned as a whole. Leave losses out",
            argument="losses",
            value=names,
        )
    if not module.automatic_optimization and (not names or TRAINING_STEP in names):
        raise UsageError(
            f"{kind} optimizes manually: its training_step has backwards and steps of optimizers in it, so it is no "
            "step that could be planned as a whole. Let a method of its own compute each loss that manual_backward is "
            'called on, and name them: MemoryBudget(budget, losses=["generator_loss", "discriminator_loss"])',
            argument="losses",
            value=names,
        )
    for name in names:
        method = getattr(module, name, None)
        if not callable(method) or isinstance(method, torch.nn.Module):
            known = [each for each in vars(type(module)) if callable(getattr(module, each))]
            raise UsageError(
                f"losses: {kind} has no method {name!r}{did_you_mean(name, known)}; a module in it is fitted by "
                "itself, inside of a method that computes the loss with it",
                argument="losses",
                value=name,
            )

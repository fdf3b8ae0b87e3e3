"""What no plan can hold of a training with Lightning, refused by name before the first step.

1. A trainer whose strategy wraps the model or spreads it over devices or processes; a compiled module; a
   ``training_step`` that fetches its batches itself; two budgets.
2. In manual optimization, a ``training_step`` as a whole: it has backwards and steps of optimizers in it.
3. With the optimizer in the step, what Lightning does to gradients between a backward and the optimizer's step.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy

from ebbtide.errors import UsageError
from ebbtide.integrations.lightning_steps import TRAINING_STEP
from ebbtide.names import did_you_mean

__all__ = ["refuse_inside", "refuse_methods", "refuse_trainer"]


def refuse_trainer(trainer: Trainer, module: LightningModule, *, budgets: int = 1) -> None:
    """Refuse what would run past the plan, or spreads the model (definition 1).

    Raises:
        UsageError: naming what cannot be planned and what to do.
    """
    strategy = trainer.strategy
    compiled = getattr(module, "_compiler_ctx", None) is not None
    takes_iterator = "dataloader_iter" in inspect.signature(module.training_step).parameters
    if trainer.world_size > 1:
        raise UsageError(
            f"MemoryBudget plans for one process, and this is one of {trainer.world_size} processes, in which "
            "Lightning wraps the module whose training_step is planned. Train in one process, or leave MemoryBudget "
            "out of the trainer's callbacks",
            argument="trainer",
            value=trainer,
        )
    reasons = {
        f"the strategy {type(strategy).__name__}: it wraps or spreads the model": not isinstance(
            strategy, SingleDeviceStrategy
        ),
        "a compiled LightningModule: a compiled model runs past the plan": compiled,
        "training_step(dataloader_iter): it fetches its batches itself, inside of the step": takes_iterator,
        f"{budgets} budgets of one training": budgets > 1,
    }
    for reason, there in reasons.items():
        if there:
            raise UsageError(
                f"MemoryBudget cannot plan for {reason}. Leave that out, or leave MemoryBudget out of the trainer's "
                "callbacks",
                argument="trainer",
                value=trainer,
            )


def refuse_inside(trainer: Trainer, module: LightningModule) -> None:
    """Refuse what finds no gradients, where the backward has applied them (definition 3).

    Raises:
        UsageError: naming it and what to do.
    """
    automatic = module.automatic_optimization
    accumulates = any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks)  # type: ignore[attr-defined]
    reasons = {
        f"{len(trainer.optimizers)} optimizers; it takes one": len(trainer.optimizers) != 1,
        "gradient_clip_val, which would clip what has been applied; give MemoryBudget "
        "options=ebbtide.Options(max_norm=...) instead": automatic and bool(trainer.gradient_clip_val),
        "accumulate_grad_batches, whose backwards would each update; take larger batches": automatic
        and (accumulates or trainer.accumulate_grad_batches != 1),
    }
    for reason, there in reasons.items():
        if there:
            raise UsageError(
                f'step="inside" does not go together with {reason}, or leave it out of the options of MemoryBudget',
                argument="step",
                value="inside",
            )


def refuse_methods(module: LightningModule, names: Sequence[str]) -> None:
    """Refuse names of no methods, or none where they are needed (definition 2).

    Raises:
        UsageError: saying what to name.
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
            known = [name for name, each in vars(type(module)).items() if callable(each)]
            raise UsageError(
                f"losses: {kind} has no method {name!r}{did_you_mean(name, known)}; a module in it is fitted by "
                "itself, inside of a method that computes the loss with it",
                argument="losses",
                value=name,
            )

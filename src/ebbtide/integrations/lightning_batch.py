"""The largest batch of a LightningModule that fits a budget: ``ebbtide.max_batch`` of its ``training_step``.

The step is captured in the trainer's precision, with the module on the trainer's device. What it logs goes nowhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer

from ebbtide._api.max_batch import BatchPlan, max_batch
from ebbtide.case import Case
from ebbtide.errors import UsageError
from ebbtide.integrations.lightning_refusals import refuse_trainer
from ebbtide.integrations.lightning_steps import TRAINING_STEP, losses_of, optimizer_of
from ebbtide.options import Options

__all__ = ["max_batch_of"]


def max_batch_of(
    budget: Any,
    trainer: Trainer,
    module: LightningModule | Callable[[], LightningModule],
    make_batch: Callable[[int], Any],
    overhead: float | Literal["one-forward"] | None,
    options: Options,
) -> BatchPlan:
    """``MemoryBudget.max_batch``."""
    precision = trainer.precision_plugin
    with contextlib.ExitStack() as during:

        def make_case(batch: int) -> Case:
            made = _checked(module if isinstance(module, torch.nn.Module) else module(), trainer)
            during.enter_context(_attached(made, trainer))
            made = precision.convert_module(made).train()
            assert isinstance(made, LightningModule)
            if isinstance(module, LightningModule) and options.machine is None:
                made.to(trainer.strategy.root_device)
            losses = losses_of(made, [TRAINING_STEP])
            during.enter_context(losses.keeping())
            own = options.optimizer_of(made)
            configured = _optimizers_in(made.configure_optimizers() if own is None else own)
            for each in _without_gradients(made):  # they are there when a step of the trainer begins
                each.grad = torch.zeros_like(each)
                during.callback(setattr, each, "grad", None)
            given = precision.convert_input(make_batch(batch))
            arguments = (TRAINING_STEP, (given, 0), {})
            return Case(losses, arguments, name=type(made).__name__, optimizer=optimizer_of(configured))

        during.enter_context(precision.train_step_context())
        return max_batch(make_case, budget=budget, overhead=overhead, options=replace(options, optimizer=None))


def _checked(module: object, trainer: Trainer) -> LightningModule:
    """``module``, if it is one of Lightning's whose steps its trainer could plan.

    Raises:
        UsageError: naming it.
    """
    if not isinstance(module, LightningModule):
        raise UsageError(
            f"max_batch takes a LightningModule, or a function that makes one, not {type(module).__name__}",
            argument="module",
            value=module,
        )
    refuse_trainer(trainer, module)
    if not module.automatic_optimization:
        raise UsageError(
            f"{type(module).__name__} optimizes manually, so the step that a batch has to fit is that of a method of "
            "its own: give ebbtide.max_batch a case of a module whose forward computes that loss",
            argument="module",
            value=module,
        )
    return module


@contextlib.contextmanager
def _attached(module: LightningModule, trainer: Trainer) -> Iterator[None]:
    """While open, the module has a trainer, as it has in training."""
    before = module._trainer
    module._trainer = before or trainer
    try:
        yield
    finally:
        module._trainer = before


def _without_gradients(module: LightningModule) -> list[torch.nn.Parameter]:
    return [each for each in module.parameters() if each.requires_grad and each.grad is None]


def _optimizers_in(configured: Any) -> list[torch.optim.Optimizer]:
    """The optimizers among what ``configure_optimizers`` returns, whichever of its forms it takes."""
    if isinstance(configured, torch.optim.Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return _optimizers_in(configured.get("optimizer"))
    if isinstance(configured, list | tuple):
        return [found for each in configured for found in _optimizers_in(each)]
    return []  # a scheduler's, or none

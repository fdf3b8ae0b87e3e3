"""Hugging Face's ``Trainer``: a callback that keeps every training step within a budget.

1. The model is fitted when training begins: the trainer has prepared it, and its optimizer is there. It is a plain
   model again when training ends. One that was fitted before stays as it is, and is told of the optimizer.
2. Checkpoints that the trainer has switched on (``activation_checkpointing=True``) are switched off while the model is
   fitted, since the plan decides what runs again; the numbers are the same with and without.
3. What would have the model run past the plan, or spreads it, is refused by name before the first step.
4. One callback plans a training: a second is refused. A model that another left planned, since its training ended in
   an exception, of which the trainer tells no callback, is fitted anew.
5. TRL's trainers (told by their arguments) compute their loss from log-probabilities that the model returns beside a
   loss which they do not use: gradients go through all outputs. Their fused head is an op (``fused_head``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ebbtide._api.fit import calls_of, fit, set_optimizer, step_of, unfit
from ebbtide._api.metrics import metrics_of
from ebbtide.engine.calls import Calls
from ebbtide.engine.fitted_class import FITTED
from ebbtide.errors import UsageError
from ebbtide.integrations.fused_head import opaque_head
from ebbtide.integrations.options import checked, initialized_with_options
from ebbtide.options import Options
from ebbtide.report.plan import Plan
from ebbtide.torch_seams.patches import Patch
from ebbtide.units import Budget

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("ebbtide.integrations.hf needs transformers: pip install transformers accelerate") from error

__all__ = ["MemoryBudget"]


class MemoryBudget(TrainerCallback):
    """Keeps every training step of a ``transformers.Trainer`` within ``budget``.

    ``Trainer(..., callbacks=[MemoryBudget("20GiB")])``

    Args:
        budget: as for :func:`ebbtide.fit`.
        options: likewise, but for ``optimizer``, which is the trainer's.
        log: is called with :func:`ebbtide.metrics_of` and the step where the trainer logs: ``wandb.log``,
            ``mlflow.log_metrics``.

    Attributes:
        calls: how the training calls went, once training has ended (:func:`ebbtide.calls_of`).
        plan: the plan of the step that ran last then.

    Raises:
        UsageError: for a budget that is none, for an ``optimizer``, or for an option that there is not.
    """

    @initialized_with_options
    def __init__(
        self,
        budget: str | int | Budget | Plan,
        *,
        log: Callable[[dict[str, float], int], object] | None = None,
        options: Options | None = None,
    ) -> None:
        self._budget, self._options, self._log = budget, checked(budget, options), log
        self.calls: Calls | None = None
        self.plan: Plan | None = None
        self._fitted: torch.nn.Module | None = None
        self._training: Callable[[], TrainerState | None] = lambda: None
        self._checkpointed = False
        self._head: Patch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Fit the model (definition 1).

        Raises:
            UsageError: for a trainer whose steps cannot be planned, or that another callback plans (definitions 3, 4).
        """
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        _refuse(args, model)
        if self._options.inside:
            raise UsageError(
                'MemoryBudget takes no step="inside": transformers\' Trainer takes the norm of gradients between '
                "backward and step, for its log if for nothing else, and they would have been applied by then. Leave "
                "it out, or train in a loop of your own",
                argument="step",
                value="inside",
            )
        _release_other(model, self, state)
        self._release()  # where the training before did not come to its end
        self._uncheckpoint(model)
        if _is_of_trl(args):
            self._head = opaque_head()
        if model in FITTED:
            set_optimizer(model, optimizer)
            return
        fit(model, self._budget, optimizer=optimizer, options=_options_for(args, self._options))
        how = FITTED[model].configuration
        FITTED[model].configure(replace(how, planning=replace(how.planning, takes_inside=lambda: False)))
        self._fitted, self._training = model, weakref.ref(state)
        _PLANNED[model] = weakref.ref(self)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the memory of the step beside what the trainer logs."""
        model = kwargs["model"]
        if self._log is not None and model in FITTED:
            self._log(metrics_of(model), state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the model as it was before (definition 1)."""
        model = kwargs["model"]
        if model in FITTED:
            self._look(model)
        self._release()
        if self._checkpointed:
            self._checkpointed = False
            _checkpoint_again(model, args)

    def is_of(self, training: TrainerState) -> bool:
        """Whether the model was fitted for this training."""
        return self._training() is training

    def release(self) -> None:
        """Leave the model as it was before, if it is still fitted."""
        if self._fitted is not None and self._fitted in FITTED:
            self._look(self._fitted)
        self._release()

    def _look(self, model: torch.nn.Module) -> None:
        step = step_of(model)
        self.calls, self.plan = calls_of(model), None if step is None else step.plan

    def _release(self) -> None:
        model, self._fitted = self._fitted, None
        if self._head is not None:
            self._head.close()
            self._head = None
        if model is not None and model in FITTED:
            unfit(model)

    def _uncheckpoint(self, model: Any) -> None:
        """Turn the model's own checkpointing off (definition 2)."""
        if getattr(model, "is_activation_checkpointing", False):
            model.activation_checkpointing_disable()
            self._checkpointed = True


_PLANNED: MutableMapping[torch.nn.Module, weakref.ref[MemoryBudget]] = WeakIdKeyDictionary()
"""Which callback fitted a model."""


def _release_other(model: torch.nn.Module, callback: MemoryBudget, state: TrainerState) -> None:
    """Leave a model as it was before another callback fitted it, in a training that is over (definition 4).

    Raises:
        UsageError: if it is this training.
    """
    planned = _PLANNED.pop(model, None)
    if planned is None or model not in FITTED:
        return
    other = planned()
    if other is None:
        unfit(model)
    elif other is not callback:
        if other.is_of(state):
            raise UsageError(
                "the trainer has two MemoryBudgets, and a step has one budget: leave one in its callbacks",
                argument="callbacks",
            )
        other.release()


def _checkpoint_again(model: Any, args: TrainingArguments) -> None:
    """Switch the model's checkpoints on as the trainer does."""
    how: dict[str, Any] = dict(cast("dict[str, Any]", args.activation_checkpointing_kwargs or {}))
    every, offload = how.pop("every_n_layers", 1), how.pop("offload", False)
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs=how or None, every_n_layers=every, offload=offload
    )


def _is_of_trl(args: TrainingArguments) -> bool:
    """Whether the arguments are of a trainer of TRL's (definition 5)."""
    return any(each.__module__.partition(".")[0] == "trl" for each in type(args).__mro__)


def _options_for(args: TrainingArguments, options: Options) -> Options:
    return replace(options, gradients="all") if options.gradients is None and _is_of_trl(args) else options


def _refuse(args: TrainingArguments, model: torch.nn.Module) -> None:
    """Refuse what cannot be planned (definition 3).

    Raises:
        UsageError: naming what cannot be planned and what to do.
    """
    if args.world_size > 1:
        raise UsageError(
            f"MemoryBudget plans for one process, and this is one of {args.world_size}. Leave it out of the trainer's "
            "callbacks and fit the model before the trainer gets it: ebbtide.fit(model, budget). Each process then "
            "plans for itself (docs/trainers.md, DistributedDataParallel)",
            argument="args",
            value=args,
        )
    reasons = {
        "torch_compile=True: a compiled model runs past the plan": args.torch_compile,
        "deepspeed: it moves and splits the weights itself": args.deepspeed,
        "fsdp: it splits the weights over processes": args.fsdp,
        "activation_offloading=True: it keeps what the plan keeps a second time": getattr(
            args, "activation_offloading", False
        ),
        f"{args.n_gpu} devices in one process: torch's DataParallel copies the model at every step": args.n_gpu > 1,
    }
    for reason, there in reasons.items():
        if there:
            raise UsageError(
                f"MemoryBudget cannot plan for {reason}. Leave it out of TrainingArguments, or leave MemoryBudget out "
                "of the trainer's callbacks",
                argument="args",
                value=args,
            )
    if not isinstance(model, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"the trainer's model is {type(model).__name__}, not a torch.nn.Module", argument="model")

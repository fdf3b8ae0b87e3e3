"""Lightning's ``Trainer``: a callback that keeps every training step within a budget.

1. The loss methods of the LightningModule (``lightning_steps``) are fitted when training begins: the model is on its
   device, and the optimizers are there. They are plain methods again when training ends, by an exception too.
2. In automatic optimization that is ``training_step``. In manual optimization ``training_step`` has backwards and
   steps of optimizers in it and is no step that could be planned: the methods that compute its losses are named, and
   each of their calls, to the end of its backward, is a step.
3. What would have the model run past the plan, or spreads it, is refused by name before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from ebbtide._api.fit import calls_of, fit, step_of, unfit
from ebbtide._api.max_batch import BatchPlan
from ebbtide._api.metrics import metrics_of
from ebbtide.engine.calls import Calls
from ebbtide.engine.fitted_class import FITTED
from ebbtide.entry_points import options_of, takes_options
from ebbtide.integrations.options import checked, initialized_with_options
from ebbtide.options import Options
from ebbtide.report.plan import Plan
from ebbtide.step.machine import Machine
from ebbtide.units import Budget

try:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from ebbtide.integrations.lightning_batch import max_batch_of
    from ebbtide.integrations.lightning_refusals import refuse_inside, refuse_methods, refuse_trainer
    from ebbtide.integrations.lightning_steps import TRAINING_STEP, Losses, losses_of, optimizer_of
except ImportError as error:
    raise ImportError("ebbtide.integrations.lightning needs lightning: pip install lightning") from error

__all__ = ["MemoryBudget"]

_ADVICE = (
    "MemoryBudget plans training_step, and in manual optimization the methods that losses=[...] names: what else makes "
    "gradients, such as a penalty, belongs into one of these, before its loss is returned"
)


class MemoryBudget(Callback):
    """Keeps every training step of a ``lightning.pytorch.Trainer`` within ``budget``.

    ``Trainer(..., callbacks=[MemoryBudget("20GiB")])``

    Args:
        budget: as for :func:`ebbtide.fit`.
        losses: in manual optimization, the names of the methods of the LightningModule whose results
            ``manual_backward`` is called on.
        log: whether :func:`ebbtide.metrics_of` go to the trainer's loggers, every ``log_every_n_steps``.
        options: as for :func:`ebbtide.fit`, but for ``optimizer``, which is the trainer's.

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
        losses: Sequence[str] = (),
        log: bool = False,
        options: Options | None = None,
    ) -> None:
        self._budget, self._options, self._log = budget, checked(budget, options), log
        self.calls: Calls | None = None
        self.plan: Plan | None = None
        self._losses = (losses,) if isinstance(losses, str) else tuple(losses)
        self._fitted: Losses | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be planned (definition 3).

        Raises:
            UsageError: for a trainer or a module whose steps cannot be planned.
        """
        if stage == "fit":
            self._release()  # the training before did not come to its end
            others = [each for each in trainer.callbacks if isinstance(each, MemoryBudget)]  # type: ignore[attr-defined]
            refuse_trainer(trainer, pl_module, budgets=len(others))
            refuse_methods(pl_module, self._losses)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit the loss methods (definition 1)."""
        if self._options.inside:
            refuse_inside(trainer, pl_module)
        losses = losses_of(pl_module, self._losses or (TRAINING_STEP,))
        fit(losses, self._budget, optimizer=optimizer_of(trainer.optimizers), options=self._options)
        fitted = FITTED[losses]
        fitted.configure(replace(fitted.configuration, gradients_stay=True, advice=_ADVICE))
        losses.install()
        self._fitted = losses

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Have the batches counted that are fetched ahead, and see whether a backward follows."""
        if self._fitted is not None:
            self._fitted.trains = not getattr(trainer.fit_loop, "_skip_backward", False)
            self._fitted.ahead = getattr(trainer.fit_loop._data_fetcher, "batches", [])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the memory of the step beside what the module logs."""
        if self._log and self._fitted is not None and (batch_idx + 1) % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            for logger in trainer.loggers:
                logger.log_metrics(metrics_of(self._fitted), trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was before (definition 1)."""
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the model after an exception."""
        self._release()

    @takes_options
    def max_batch(
        self,
        trainer: Trainer,
        module: LightningModule | Callable[[], LightningModule],
        make_batch: Callable[[int], Any],
        *,
        overhead: float | Literal["one-forward"] | None = None,
        machine: str | Machine | None = None,
        options: Options | None = None,
    ) -> BatchPlan:
        """The largest batch whose ``training_step`` fits the budget, by prediction.

        It takes the place of ``BatchSizeFinder``: nothing trains, and nothing runs out of memory.

        Args:
            trainer: whose precision counts; it need not have this callback.
            module: to train, or a function that makes it, for a machine that is not at hand.
            make_batch: from a number of samples to the batch that ``training_step`` gets.
            overhead: as for :func:`ebbtide.max_batch`.
            machine: as in :class:`ebbtide.Options`.
            options: all else; an ``optimizer`` is a function that makes one from the module, by default those of its
                ``configure_optimizers`` count.

        Raises:
            UsageError: for a trainer or a module whose steps cannot be planned, or for a budget that is no bytes.
            BudgetError: if not even a batch of 1 fits.
            CaptureError: if the step is not one graph.
        """
        asked = options_of("max_batch", options, machine=machine)
        return max_batch_of(self._budget, trainer, module, make_batch, overhead, asked)

    def _release(self) -> None:
        losses, self._fitted = self._fitted, None
        if losses is None:
            return
        losses.remove()
        if losses in FITTED:
            step = step_of(losses)
            self.calls, self.plan = calls_of(losses), None if step is None else step.plan
            unfit(losses)

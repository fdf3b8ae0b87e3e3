"""What to log of a fitted model while it trains: numbers by name, as every experiment tracker takes them."""

from __future__ import annotations

import torch

from ebbtide._api.fit import calls_of, step_of
from ebbtide.engine.fitted_class import FITTED
from ebbtide.names import with_known_keywords

__all__ = ["metrics_of"]

_PREFIX = "ebbtide/"


@with_known_keywords
def metrics_of(model: torch.nn.Module) -> dict[str, float]:
    """Memory and time of the step that ran last, and counts of calls, as numbers by name for an experiment tracker.

    ``wandb.log(ebbtide.metrics_of(model))``; ``mlflow.log_metrics(ebbtide.metrics_of(model), step)``; for TensorBoard
    ``writer.add_scalar(name, value, step)`` of each.

    Returns:
        ``ebbtide/budget_bytes``, ``ebbtide/predicted_peak_bytes``, ``ebbtide/measured_peak_bytes`` once a step was
        measured, ``ebbtide/unplanned_peak_bytes``; ``ebbtide/predicted_overhead`` and its ``ebbtide/bound`` as shares
        of the unplanned step; ``ebbtide/planned_calls``, ``ebbtide/unplanned_calls``, ``ebbtide/shapes`` (steps that
        are captured) and ``ebbtide/plans`` (that are at hand). Before the first step the counts alone.

    Raises:
        UsageError: if the model is not fitted.
    """
    calls, step = calls_of(model), step_of(model)
    fitted = FITTED[model]
    found: dict[str, float | None] = {
        "planned_calls": calls.planned,
        "unplanned_calls": sum(calls.unplanned.values()),
        "shapes": len(fitted.steps.all()),
        "plans": len(fitted.steps.plans()),
    }
    if step is not None and (plan := step.plan) is not None:
        above = step.measured_above_bytes
        found |= {
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "measured_peak_bytes": None if above is None else plan.resident_bytes + above,
            "unplanned_peak_bytes": plan.baseline_peak_bytes,
            "predicted_overhead": plan.overhead,
            "bound": plan.bound,
        }
    return {f"{_PREFIX}{name}": float(value) for name, value in found.items() if value is not None}

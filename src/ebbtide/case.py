"""A case: a model with the arguments of one training call. What every command and benchmark plans for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """A model and the arguments of one training call, with what belongs to its step.

    What is left out of the last five is as for :func:`ebbtide.plan`. Arguments of the function or command that plans
    the case override them.

    Attributes:
        model: in training mode.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        name: for reports.
        optimizer: whose state counts as resident, also what it does not hold yet.
        loss: applied to what the model returns; ``None`` if the call's result is the scalar loss.
        gradients: which outputs take gradients, ``"loss"`` or ``"all"``.
        step: where the optimizer steps, ``"inside"`` of the step or ``"outside"``.
        max_norm: to what norm gradients are clipped in the step.
    """

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    name: str = ""
    _: KW_ONLY
    optimizer: torch.optim.Optimizer | None = None
    loss: Callable[[Any], Any] | None = None
    gradients: Literal["loss", "all"] | None = None
    step: Literal["outside", "inside"] | None = None
    max_norm: float | None = None

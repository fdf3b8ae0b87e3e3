"""What ``--optimizer`` may name, and the optimizer of a model that it then is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ebbtide.errors import UsageError
from ebbtide.names import did_you_mean
from ebbtide.options import no_optimizer

if TYPE_CHECKING:
    import torch

__all__ = ["OPTIMIZERS", "OPTIMIZER_NAMES", "optimizer_named"]

OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "adadelta": ("Adadelta", {}),
    "adafactor": ("Adafactor", {}),
    "adagrad": ("Adagrad", {}),
    "adam": ("Adam", {}),
    "adamax": ("Adamax", {}),
    "adamw": ("AdamW", {}),
    "asgd": ("ASGD", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "rmsprop": ("RMSprop", {}),
    "rprop": ("Rprop", {}),
    "sgd": ("SGD", {"lr": 1e-3}),
    "sgd-momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
}
"""A class of ``torch.optim`` by name, and with what it is made for the bytes of its state."""
OPTIMIZER_NAMES = (*OPTIMIZERS, "none")


def optimizer_named(name: str | None) -> Callable[[torch.nn.Module], torch.optim.Optimizer] | None:
    """What makes the optimizer ``name`` of a model; ``none`` is no optimizer, whatever the case has.

    Raises:
        UsageError: if there is none, listing those there are.
    """
    if name is None:
        return None
    name = next((known for known in OPTIMIZER_NAMES if known.lower() == name.lower()), name)  # its class, AdamW
    if name == "none":
        return no_optimizer
    if name not in OPTIMIZERS:
        raise UsageError(
            f"optimizer {name!r} is not known; accepted: {', '.join(OPTIMIZER_NAMES)}"
            f"{did_you_mean(name, OPTIMIZER_NAMES)}",
            argument="optimizer",
            value=name,
            accepted=OPTIMIZER_NAMES,
        )
    kind, settings = OPTIMIZERS[name]

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        import torch

        made: Any = getattr(torch.optim, kind)
        return made([p for p in model.parameters() if p.requires_grad], **settings)

    return make

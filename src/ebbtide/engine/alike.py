"""What has to be the same on all ranks that train a model together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from ebbtide.engine.configuration import Request
from ebbtide.units import format_count
from ebbtide.version import __version__

__all__ = ["alike_on_all_ranks"]


def alike_on_all_ranks(model: torch.nn.Module, request: Request) -> Mapping[str, str]:
    """The versions, the model and the budget as it was asked for, in words."""
    digest, count, numbers = hashlib.sha256(), 0, 0
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad};".encode())
        count, numbers = count + 1, numbers + parameter.numel()
    budget = request.budget
    asked = f"{budget.bytes} bytes" if budget.share is None else f"{100 * budget.share:g} %"
    return {
        "version of Ebbtide": __version__,
        "version of torch": str(torch.__version__),
        "model": f"{type(model).__name__} with {format_count(count, 'parameter')}, {numbers} numbers, "
        f"{digest.hexdigest()[:8]} by names and shapes",
        "budget": asked if request.given_plan is None else f"{asked} of a given plan",
    }

"""What has to be the same on all ranks that train a model together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from ebbtide.engine.configuration import Request
from ebbtide.units import format_count
from ebbtide.version import __version__

__all__ = ["alike_on_all_ranks"]


def alike_on_all_ranks(model: torch.nn.Module, request: Request) -> Mapping[str, str | int]:
    """The versions and the model in words, and the budget as it was asked for: bytes, or a share in words."""
    digest, count, numbers = hashlib.sha256(), 0, 0
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad};".encode())
        count, numbers = count + 1, numbers + parameter.numel()
    budget = request.budget
    asked = f"{100 * budget.share:g} %" if budget.share is not None else budget.bytes or 0
    return {
        "version of Ebbtide": __version__,
        "version of torch": str(torch.__version__),
        "model": f"{type(model).__name__} with {format_count(count, 'parameter')}, {numbers} numbers, "
        f"{digest.hexdigest()[:8]} by names and shapes",
        "budget": asked if request.given_plan is None else f"{asked} of a given plan",
    }

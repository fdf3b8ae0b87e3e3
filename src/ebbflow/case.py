"""A case: a model with the arguments of one training call. What every command and benchmark plans for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """A model and the arguments of one training call whose result is a scalar loss.

    Attributes:
        model: in training mode.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        name: for reports.
    """

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    name: str = ""

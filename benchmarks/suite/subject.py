"""A model of the suite: what is trained, and how its users checkpoint it block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["NotSupported", "Subject", "WithLoss", "checkpoint_blocks", "checkpoint_lists", "loss_of"]

SEED = 0


class NotSupported(Exception):
    """What the model does not offer, in words."""


@dataclass(frozen=True)
class Subject:
    """One training call.

    Attributes:
        model: in training mode; its call returns the loss, or an output that has it.
        kwargs: of the call.
        checkpoint: turns the library's own per-block checkpointing on; raises :class:`NotSupported` if there is none.
    """

    model: nn.Module
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    checkpoint: Callable[..., None] | None = None

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """Copies of the model's buffers, as they are when this is first asked for."""
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    def enable_checkpoints(self, **options: Any) -> None:
        """Every block under ``torch.utils.checkpoint`` from here on, with ``options`` where the model takes them."""
        if self.checkpoint is None:
            checkpoint_blocks(self.model)
        else:
            self.checkpoint(self.model, **options)


def loss_of(outputs: Any) -> Tensor:
    """The scalar that the backward starts from."""
    return outputs if isinstance(outputs, Tensor) else outputs["loss"]


class WithLoss(nn.Module):
    """An image model with the loss inside: cross entropy for classes, mean squares for what has a target's shape.

    Models with auxiliary heads return several outputs in training; each has its loss, all of the same weight.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: Tensor, x: Tensor | None = None, **inputs: Tensor) -> Tensor:
        outputs = self.model(**inputs) if x is None else self.model(x, **inputs)
        outputs = getattr(outputs, "sample", outputs)
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        losses = [self._loss(each, target) for each in several]
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    @staticmethod
    def _loss(output: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            return nn.functional.mse_loss(output, target)
        return nn.functional.cross_entropy(output, target)


def checkpoint_blocks(model: nn.Module) -> None:
    """``torch.utils.checkpoint`` around every block: the entries of the model's outermost lists of several modules.

    For libraries without a switch. An entry counts if it has parameters and takes and gives what a call of it does;
    the wrapper changes nothing but when its inner tensors are made.
    """
    found = _lists(model)
    if not found:
        raise NotSupported("no list of blocks")
    for blocks in found:
        for block in blocks.children():
            if next(block.parameters(), None) is not None:
                _wrap(block)


def checkpoint_lists(model: nn.Module, names: Sequence[str], **options: Any) -> None:
    """``torch.utils.checkpoint`` around every module of several parts in the lists that are named so.

    Args:
        model: changed in place.
        names: of attributes, wherever in the model.
        options: of ``torch.utils.checkpoint.checkpoint``.
    """
    lists = [module for name, module in model.named_modules() if name.rpartition(".")[2] in names]
    blocks = [each for found in lists for each in found.children() if next(each.children(), None) is not None]
    if not blocks:
        raise NotSupported(f"no blocks in {' or '.join(names)}")
    for block in blocks:
        _wrap(block, **options)


def _lists(module: nn.Module) -> list[nn.Module]:
    """Outermost ``Sequential`` and ``ModuleList`` of at least two modules, not below one another."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList) and len(child) > 1:
            found.append(child)
        else:
            found += _lists(child)
    return found


def _wrap(block: nn.Module, **options: Any) -> None:
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, **options, **kwargs)

    block.forward = forward

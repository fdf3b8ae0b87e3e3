"""Ways to run a step of a subject: as it is, under PyTorch's own means against memory, and fitted to a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from cards.subjects import loss_of
from ebbtide import Case
from ebbtide.options import DEFAULT_EFFORT
from harness.min_cut import budget_of, min_cut_compiled

__all__ = ["Running", "checkpointed", "eager", "fitted", "memory_budget", "saved_on_cpu"]

SEED = 7  # of a step's dropout


@dataclass
class Running:
    """A model with what is called for a step, ``forward``, and the context of its calls."""

    case: Case
    forward: Callable[..., Any]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def step(self) -> torch.Tensor:
        """Forward and backward from no gradients; the loss, which stays on its device."""
        self.case.model.zero_grad(set_to_none=True)
        with self.context():
            loss = loss_of(self.forward(*self.case.args, **self.case.kwargs))
            loss.backward()
        return loss.detach()

    def results(self) -> dict[str, torch.Tensor]:
        """Loss and gradients of a step from :data:`SEED`, on CPU; no gradient is left."""
        torch.manual_seed(SEED)
        found = {"loss": self.step().cpu()}
        # By place: a checkpoint around a block changes the names of what is in it.
        places = enumerate(self.case.model.parameters())
        found |= {f"gradient {place}": p.grad.cpu() for place, p in places if p.grad is not None}
        self.case.model.zero_grad(set_to_none=True)
        return found


def eager(case: Case) -> Running:
    """The step as PyTorch runs it."""
    return Running(case, case.model)


class _Checkpointed(nn.Module):
    """A block under one checkpoint."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        """Whatever else the model asks its block."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def checkpointed(case: Case, lists: tuple[str, ...]) -> Running:
    """``torch.utils.checkpoint`` around every module of the lists that are named so, wherever they are."""
    found = [m for name, m in case.model.named_modules() if name.rpartition(".")[2] in lists]
    blocks = [each for each in found if isinstance(each, nn.ModuleList | nn.Sequential)]
    assert blocks, f"no {' or '.join(lists)} in {case.name}"
    for modules in blocks:
        for index, block in enumerate(modules):
            modules[index] = _Checkpointed(block)
    return Running(case, case.model)


def memory_budget(case: Case, share: float) -> Running:
    """``torch.compile``'s min-cut partitioner under ``activation_memory_budget=share``; ops as captured, one by one."""
    return Running(case, min_cut_compiled(case.model), partial(budget_of, share))


def saved_on_cpu(case: Case) -> Running:
    """``torch.autograd.graph.save_on_cpu``: everything that the backward reads goes to pinned memory of the host."""
    on_card = any(each.is_cuda for each in case.model.parameters())
    return Running(case, case.model, partial(torch.autograd.graph.save_on_cpu, pin_memory=on_card))


def fitted(
    case: Case, budget: int | str, effort: int = DEFAULT_EFFORT, planner: str = "auto", tiers: str | None = None
) -> Running:
    """The model fitted to ``budget``, all of the step's bytes counted."""
    ebbtide.fit(case.model, budget, tiers=tiers, options=ebbtide.Options(effort=effort, planner=planner))
    return Running(case, case.model)

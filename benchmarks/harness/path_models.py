"""The models of ``path.py``, and PyTorch's own means on them: eager, per-block checkpoint, activation_memory_budget.

The models are those of the peers' comparison: deep and narrow, so that activations and not parameters decide. Our
own zoo builds them; eager's peaks above the step's start are 16.5, 399.5 and 436.6 MiB, as published there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ebbtide import Case
from ebbtide.zoo import GPT, GPTConfig, MLPChain, gpt, mlp_chain
from harness.measuring import step
from harness.min_cut import budget_of, min_cut_compiled

__all__ = ["CASES", "MEMORY_BUDGETS", "Method", "build", "checkpointed", "eager", "memory_budget"]

GPT_24L = GPTConfig(vocabulary=512, length=256, layers=24, width=128, heads=4)
GPT_12L = GPTConfig(vocabulary=4096, length=256, layers=12, width=512, heads=8)

CASES: dict[str, Callable[[], Case]] = {
    "chain-64": lambda: mlp_chain(512, layers=64, width=64),
    "gpt-24L-d128-b8": lambda: gpt(8, GPT_24L),
    "gpt-12L-d512-v4096": lambda: gpt(4, GPT_12L),
}

# Below these PyTorch's peaks rise again on our models (a saved tensor less, a recomputed chain more).
MEMORY_BUDGETS: dict[str, tuple[float, ...]] = {
    "chain-64": (0.9, 0.5, 0.3, 0.1),
    "gpt-24L-d128-b8": (0.5, 0.2, 0.15, 0.1, 0.07, 0.05),
    "gpt-12L-d512-v4096": (0.5, 0.3, 0.2, 0.1),
}


def build(name: str) -> Case:
    """The case ``name``, with the same weights and inputs at every call."""
    torch.manual_seed(0)
    return CASES[name]()


@dataclass(frozen=True)
class Method:
    """A way to run a step: the model whose parameters take gradients, and what is called."""

    model: nn.Module
    run: Callable[..., Any]


def eager(name: str) -> Method:
    """The step as PyTorch runs it."""
    model = build(name).model
    return Method(model, model)


class _CheckpointedChain(MLPChain):
    """Each linear with its GELU under one checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda h, layer=layer: F.gelu(layer(h)), x, use_reentrant=False)  # type: ignore[assignment]
        return x.square().mean()


class _CheckpointedBlock(nn.Module):
    """A block under one checkpoint."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def checkpointed(name: str) -> Method:
    """``torch.utils.checkpoint`` around every block, as its users place it."""
    model = build(name).model
    if isinstance(model, GPT):
        for index, block in enumerate(model.blocks):
            model.blocks[index] = _CheckpointedBlock(block)
    else:
        assert isinstance(model, MLPChain)
        model.__class__ = _CheckpointedChain
    return Method(model, model)


def memory_budget(name: str, share: float) -> Method:
    """``torch.compile`` with the min-cut partitioner under ``activation_memory_budget=share``; ATen as captured.

    The partitioner reads its budget at the first call, which is made here.
    """
    case = build(name)
    compiled = min_cut_compiled(case.model)
    with budget_of(share):
        step(compiled, case.args)
    return Method(case.model, compiled)

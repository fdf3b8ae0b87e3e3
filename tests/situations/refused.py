"""What no plan can hold is refused by name; what looks like it is planned."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from situations.parts import Attention, Chain, Wrapped
from situations.registry import Refusal, situation
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


@situation(refused=Refusal("CaptureError", "depends on data|data-dependent|branch|control flow"))
def branch_on_data(run: Run) -> None:
    run.train(
        Wrapped(lambda m, x: x.square().mean() if x.sum() > 0 else x.abs().mean()), lambda m, i: _loss(m, run.x(i))
    )


@situation(refused=Refusal("CaptureError", "depends on data|data-dependent|nonzero|size"))
def size_from_data(run: Run) -> None:
    run.train(Wrapped(lambda m, x: x[x > 0].square().mean()), lambda m, i: _loss(m, run.x(i)))


@situation(refused=Refusal("CaptureError", "packed"))
def packed_sequence(run: Run) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(8, 8)

        def forward(self, x: Any) -> torch.Tensor:
            return self.rnn(x)[0].data.square().mean()

    def step(model: Any, i: int) -> Any:
        return _loss(model, nn.utils.rnn.pack_padded_sequence(run.x(i, 12, 4, 8), torch.tensor([12, 10, 7, 3])))

    run.train(Packed(), step)


@situation(refused=Refusal("UsageError", "torch.compile|compiled"))
def compiled_first(run: Run) -> None:
    """``fit(torch.compile(model))``."""
    run.fit(torch.compile(Chain(), backend="eager"))


@situation(refused=Refusal("UsageError", "torch.jit|ScriptModule"))
def scripted(run: Run) -> None:
    run.fit(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.GELU())))


@situation(refused=Refusal("BudgetError", "no plan within the budget"))
def budget_too_small(run: Run) -> None:
    run.train(Chain(), lambda m, i: _loss(m, run.x(i)), budget="64KiB")


@situation(share=0.9)
def printing(run: Run) -> None:
    """``print`` in the forward: a refusal says how to leave it out, or the step is planned without it."""

    class Printing(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                print("forward", x.shape)
            return super().forward(x)

    run.train(Printing(), lambda m, i: _loss(m, run.x(i)))


@situation(share=1.1, captures=1)
def recurrent(run: Run) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.rnn(x)[0]).square().mean()

    run.train(Recurrent(), lambda m, i: _loss(m, run.x(i, 8, 4, 16)), steps=3)


@situation(share=0.95)
def custom_function(run: Run) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad * 2 + x * 0

    run.train(Wrapped(lambda m, x: Doubled.apply(x).square().mean()), lambda m, i: _loss(m, run.x(i)))


@situation(share=0.95)
def attention_blocks(run: Run) -> None:
    run.train(Attention(p=0.1, blocks=3), lambda m, i: _loss(m, run.x(i, 8, 32, 32)))

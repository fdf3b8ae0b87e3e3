"""Graphs that are retained, losses outside, and budgets of 100 %."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from situations.parts import Attention, Chain, ConvNet, TokenModel
from situations.registry import situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


@situation(share=0.75, over=(3,))
def retained_later_tight(run: Run) -> None:
    _retained_later(run)


@situation(share=1.1)
def retained_later_roomy(run: Run) -> None:
    _retained_later(run)


def _retained_later(run: Run) -> None:
    """Ordinary steps first, then ``retain_graph=True``."""
    model = run.fit(Chain())
    for i in range(6):
        model.zero_grad()
        x = run.x(i)
        retain = i >= 3
        with run.step():
            loss = model(x)
            loss.backward(retain_graph=retain)
            if retain:
                loss.backward()
        run.see_model(model, f"step {i}")
        del loss


@situation(share=0.6, over=(0,))
def retained_always_tight(run: Run) -> None:
    _retained_always(run)


@situation(share=1.1)
def retained_always_roomy(run: Run) -> None:
    _retained_always(run)


def _retained_always(run: Run) -> None:
    model = run.fit(Chain(p=0.1))
    for i in range(4):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward(retain_graph=True)
            loss.backward()
        run.see_model(model, f"step {i}")
        del loss


@situation(over=(0,))
def retained_and_never_used(run: Run) -> None:
    """Everywhere ``retain_graph=True``, as copied from somewhere."""
    run.train(Chain(), lambda m, i: _retaining(m, run.x(i)))


def _retaining(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward(retain_graph=True)
    return loss.detach()


@situation(share=0.9, over=(0,))
def two_losses_of_one_graph(run: Run) -> None:
    class Two(Chain):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.features(x)
            return x.square().mean(), x.abs().mean()

    def step(model: Any, i: int) -> Any:
        one, other = model(run.x(i))
        one.backward(retain_graph=True)
        other.backward()
        return one.detach(), other.detach()

    run.train(Two(), step)


@situation(share=0.9, over=(0,))
def gradients_asked_for_before(run: Run) -> None:
    """``autograd.grad`` with a retained graph, then ``backward``: a penalty on its norm."""

    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i))
        first = torch.autograd.grad(loss, model.layers[0].weight, retain_graph=True)
        loss.backward()
        return loss.detach(), first

    run.train(Chain(), step)


LOSSES = {
    "square": lambda out, i: out.square().mean(),
    "cross_entropy": lambda out, i: F.cross_entropy(out, torch.arange(out.shape[0]) % out.shape[1]),
    "heavy": lambda out, i: sum(torch.tanh(out * k).square().mean() for k in range(1, 6)),
    "pairwise": lambda out, i: (out[:256] @ out[:256].t()).softmax(-1).square().mean(),
}


@variants(LOSSES)
def loss_outside(run: Run, loss_of: Any) -> None:
    def step(model: Any, i: int) -> Any:
        loss = loss_of(model(run.x(i)), i)
        loss.backward()
        return loss.detach()

    run.train(Chain(loss=False), step, steps=6)


@situation(over=(3, 4, 5))
def loss_outside_that_grows(run: Run) -> None:
    """What it takes is measured once."""

    def step(model: Any, i: int) -> Any:
        out = model(run.x(i))
        loss = sum((torch.tanh(out * k).square().mean() for k in range(1, 2 + 2 * (i > 2))), out.new_zeros(()))
        loss.backward()
        return loss.detach()

    run.train(Chain(loss=False), step, steps=6)


@situation()
def loss_outside_output_kept(run: Run) -> None:
    model = run.fit(Chain(loss=False))
    for i in range(5):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            out = model(x)
            loss = out.square().mean()
            loss.backward()
        run.see_model(model, f"step {i}")


@situation()
def loss_module_with_parameters(run: Run) -> None:
    """A head outside that trains as well."""
    model, head = run.fit(Chain(loss=False)), nn.Linear(64, 10)
    for i in range(5):
        model.zero_grad()
        head.zero_grad()
        x = run.x(i)
        with run.step(beside=[head]):
            loss = F.cross_entropy(head(model(x)), torch.arange(1024) % 10)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")
        run.see_model(head, f"head {i}")


@situation()
def two_heads_outside(run: Run) -> None:
    class Heads(Chain):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.features(x)
            return {"a": x[:, :32], "b": x[:, 32:].tanh()}

    def step(model: Any, i: int) -> Any:
        out = model(run.x(i))
        loss = out["a"].square().mean() + (out["b"].abs().mean() if i % 2 else 0.0)
        del out
        loss.backward()
        return loss.detach()

    run.train(Heads(), step, steps=5)


SMALL = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 4)), lambda run, i: run.x(i, 2, 4)),
    "chain": (lambda: Chain(8, 2), lambda run, i: run.x(i, 4, 8)),
    "chain_dropout": (lambda: Chain(8, 2, 0.1), lambda run, i: run.x(i, 4, 8)),
    "larger_chain": (Chain, lambda run, i: run.x(i)),
    "convolutions": (ConvNet, lambda run, i: run.x(i, 2, 3, 8, 8)),
    "attention": (lambda: Attention(p=0.1), lambda run, i: run.x(i, 2, 4, 32)),
    "tokens": (TokenModel, lambda run, i: run.tokens(i, 1, 4)),
}


@variants(SMALL)
def hundred_percent(run: Run, case: Any) -> None:
    """``"100%"`` always works."""
    make, batch = case

    def step(model: Any, i: int) -> Any:
        loss = model(batch(run, i)).square().mean()
        loss.backward()
        return loss.detach()

    run.train(make(), step, budget="100%")


@variants({"linear": SMALL["linear"], "chain_dropout": SMALL["chain_dropout"]})
def hundred_percent_with_adamw(run: Run, case: Any) -> None:
    make, batch = case

    def step(model: Any, i: int) -> Any:
        loss = model(batch(run, i)).square().mean()
        loss.backward()
        return loss.detach()

    run.train(make(), step, budget="100%", optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))

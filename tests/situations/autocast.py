"""Autocast in every place, and other types."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from situations.parts import Attention, Chain, ConvNet, TokenModel
from situations.registry import Refusal, situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


CAST = {
    "chain": (lambda: Chain(p=0.1), lambda run, i: run.x(i)),
    "sdpa": (lambda: Attention(sdpa=True), lambda run, i: run.x(i, 8, 32, 32)),
    "sdpa_dropout": (lambda: Attention(sdpa=True, p=0.2), lambda run, i: run.x(i, 8, 32, 32)),
    "attention_dropout": (lambda: Attention(sdpa=False, p=0.2), lambda run, i: run.x(i, 8, 32, 32)),
    "attention": (lambda: Attention(sdpa=False), lambda run, i: run.x(i, 8, 32, 32)),
    "multihead": (lambda: _Multihead(0.0), lambda run, i: run.x(i, 8, 32, 32)),
    "multihead_dropout": (lambda: _Multihead(0.2), lambda run, i: run.x(i, 8, 32, 32)),
    "convolutions": (lambda: _Mean(ConvNet(p=0.2)), lambda run, i: run.x(i, 4, 3, 24, 24)),
    "tokens": (lambda: _Mean(TokenModel(p=0.1)), lambda run, i: run.tokens(i)),
    "encoder_layer": (
        lambda: _Mean(nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True)),
        lambda run, i: run.x(i, 8, 32, 32),
    ),
}


class _Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).float().square().mean()


class _Multihead(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, dropout=p, batch_first=True)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0]).float().square().mean()


@variants(CAST, share=0.95)
def autocast(run: Run, case: Any) -> None:
    """bf16 as PyTorch advises it: the forward inside, the backward outside."""
    make, batch = case

    def step(model: Any, i: int) -> Any:
        x = batch(run, i)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
        loss.backward()
        return loss.detach()

    run.train(make(), step)


@variants(
    {name: CAST[name] for name in ("chain", "sdpa_dropout", "attention_dropout", "convolutions")},
    share=0.95,
    refused=Refusal("CaptureError", "autocast"),
    either=True,
)
def backward_inside_autocast(run: Run, case: Any) -> None:
    """An error before any gradient leaves, or the right numbers."""
    make, batch = case

    def step(model: Any, i: int) -> Any:
        x = batch(run, i)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
            loss.backward()
        return loss.detach()

    run.train(make(), step)


@situation(share=0.95, captures=-1, refused=Refusal("CaptureError", "autocast"), either=True)
def backward_inside_from_step_two(run: Run) -> None:
    """The first backward is outside, later ones inside: never silently other numbers."""

    def step(model: Any, i: int) -> Any:
        x = run.x(i, 8, 32, 32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
            if i >= 2:
                loss.backward()
        if i < 2:
            loss.backward()
        return loss.detach()

    run.train(Attention(p=0.2, sdpa=False), step)


@situation(share=0.95, refused=Refusal("CaptureError", "autocast"), either=True)
def backward_alone_inside_autocast(run: Run) -> None:
    """A float32 forward outside, its backward inside."""

    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i, 8, 32, 32))
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        return loss.detach()

    run.train(Attention(p=0.2, sdpa=False), step)


@situation(captures=2)
def autocast_on_and_off(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        x = run.x(i)
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(i % 2)):
            loss = model(x)
        loss.backward()
        return loss.detach()

    run.train(Chain(p=0.1), step, steps=6)


@situation(share=0.95)
def autocast_within_the_model(run: Run) -> None:
    class Casting(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                loss = super().forward(x)
            with torch.autocast("cpu", enabled=False):
                return loss + self.out[0](x).square().mean()

    run.train(Casting(p=0.2, sdpa=False), lambda m, i: _loss(m, run.x(i, 8, 32, 32)))


@situation(share=1.0, limit="two forwards inside of one autocast block")
def autocast_two_forwards(run: Run) -> None:
    """Within one block, weights are cast once and their copies are shared."""

    def step(model: Any, i: int) -> Any:
        one, other = run.x(2 * i), run.x(2 * i + 1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(one) + model(other)
        loss.backward()
        return loss.detach()

    run.train(Chain(), step)


@situation(share=0.95)
def autocast_with_scaler(run: Run) -> None:
    """``GradScaler``, as float16 loops have it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    model = Chain()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.fit(model)
    for i in range(4):
        sgd.zero_grad()
        x = run.x(i)
        with run.step():
            with torch.autocast("cpu", torch.float16):
                loss = model(x)
            scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def bfloat16_parameters(run: Run) -> None:
    run.train(Chain(p=0.1).bfloat16(), lambda m, i: _loss(m, run.x(i).bfloat16()))


@situation(share=0.9)
def float64(run: Run) -> None:
    run.train(Chain(p=0.1).double(), lambda m, i: _loss(m, run.x(i).double()))

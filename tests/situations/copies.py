"""Gradients that autograd copies on their way into ``.grad``: expanded, laid out otherwise, or shared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from situations.parts import Chain, Mapped, Wrapped
from situations.registry import situation, variants
from situations.run import Run


def _backward(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


def _p(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.05


HEAVY = {
    "einsum": lambda: Mapped(lambda m, x: torch.einsum("bi,oi->bo", x, m.w).square().mean(), w=_p(512, 512)),
    "einsum_transposed": lambda: Mapped(lambda m, x: torch.einsum("bi,io->bo", x, m.w).square().mean(), w=_p(512, 512)),
    "einsum_three": lambda: Mapped(
        lambda m, x: torch.einsum("bi,oi,po->bp", x, m.v, m.w).square().mean(), v=_p(512, 512), w=_p(512, 512)
    ),
    "cat_weights": lambda: Mapped(
        lambda m, x: (x @ torch.cat([m.q, m.k, m.v], 1)).square().mean(), q=_p(512, 256), k=_p(512, 256), v=_p(512, 256)
    ),
    "cat_rows": lambda: Mapped(
        lambda m, x: F.linear(x, torch.cat([m.q, m.k])).square().mean(), q=_p(256, 512), k=_p(256, 512)
    ),
    "stack_weights": lambda: Mapped(
        lambda m, x: (x @ torch.stack([m.q, m.k])).square().mean(), q=_p(512, 512), k=_p(512, 512)
    ),
    "weight_sum": lambda: Mapped(lambda m, x: m.w.sum() + x.mean(), w=_p(1024, 1024)),
    "weight_mean": lambda: Mapped(lambda m, x: m.w.mean() + x.mean(), w=_p(1024, 1024)),
    "weight_sums": lambda: Mapped(lambda m, x: m.w.sum() + m.v.sum() * 2 + x.mean(), w=_p(512, 512), v=_p(512, 512)),
    "row_sums": lambda: Mapped(lambda m, x: m.w.sum(0).square().sum() + x.mean(), w=_p(1024, 1024)),
    "eight_added": lambda: Mapped(
        lambda m, x: (x @ sum(m.parameters())).square().mean(), **{f"p{i}": _p(512, 512) for i in range(8)}
    ),
    "two_added": lambda: Mapped(lambda m, x: (x @ (m.a + m.b)).square().mean(), a=_p(512, 512), b=_p(512, 512)),
    "subtracted": lambda: Mapped(lambda m, x: (x @ (m.a - m.b)).square().mean(), a=_p(512, 512), b=_p(512, 512)),
    "transposed": lambda: Mapped(lambda m, x: (x @ m.w.t()).square().mean(), w=_p(512, 512)),
    "permuted": lambda: Mapped(
        lambda m, x: (x @ m.w.permute(1, 2, 0).reshape(512, 512)).square().mean(), w=_p(4, 512, 128)
    ),
    "transposed_parameter": lambda: Mapped(lambda m, x: (x @ m.w).square().mean(), w=_p(512, 512).t()),
    "part_used": lambda: Mapped(lambda m, x: (x @ m.w[:512]).square().mean(), w=_p(1024, 512)),
    "part_summed": lambda: Mapped(lambda m, x: m.w[:, :100].sum() + x.mean(), w=_p(1024, 1024)),
    "flattened_together": lambda: Mapped(
        lambda m, x: torch.cat([m.a.flatten(), m.b.flatten()]).square().sum() + x.mean(), a=_p(512, 512), b=_p(512, 512)
    ),
    "expanded": lambda: Mapped(lambda m, x: (m.w.expand(4, 512, 512) @ x[:4, :, None]).square().mean(), w=_p(512, 512)),
    "symmetric": lambda: Mapped(lambda m, x: (x @ (m.w + m.w.t())).square().mean(), w=_p(512, 512)),
    "clone_and_sum": lambda: Mapped(lambda m, x: (m.w.clone() + m.v).sum() + x.mean(), w=_p(512, 512), v=_p(512, 512)),
    "bias_only": lambda: Mapped(lambda m, x: (x.repeat(8, 1) + m.b).sum(), b=_p(512, 512)),
    "bmm": lambda: Mapped(lambda m, x: torch.bmm(x.view(8, 8, 512), m.w).square().mean(), w=_p(8, 512, 64)),
    "half": lambda: Mapped(
        lambda m, x: (x.bfloat16() @ m.w.t() + m.w.sum()).float().square().mean(), w=_p(512, 512).bfloat16()
    ),
    "complex": lambda: Mapped(
        lambda m, x: (x.to(torch.complex64) @ m.w.mH).abs().mean(), w=torch.complex(_p(256, 512), _p(256, 512))
    ),
    "weight_norm": lambda: Mapped(
        lambda m, x: F.linear(x, torch._weight_norm(m.v, m.g, 0)).square().mean(), v=_p(512, 512), g=_p(512, 1)
    ),
}


@variants(HEAVY, share=1.03)
def weights(run: Run, make: Any) -> None:
    """Parameters and their gradients are most of the step: what eager fits has to fit, no more."""
    run.train(make(), lambda m, i: _backward(m, run.x(i, 64, 512)), steps=3)


@situation(share=1.35)
def weights_used_twice(run: Run) -> None:
    """Eager adds the second gradient in place; the captured step has one buffer more."""
    model = Mapped(lambda m, x: (x @ m.w @ m.w).square().mean(), w=_p(512, 512))
    run.train(model, lambda m, i: _backward(m, run.x(i, 64, 512)), steps=3)


@variants({k: HEAVY[k] for k in ("einsum", "cat_weights", "weight_sum", "eight_added", "two_added")}, share=1.6)
def accumulated(run: Run, make: Any) -> None:
    """Gradients are there from the second step on. Eager adds one at a time; a captured backward gives all at once."""
    run.train(make(), lambda m, i: _backward(m, run.x(i, 64, 512)), steps=4, zero=False)


@variants(
    {
        "einsum": lambda: Wrapped(lambda m, x: torch.einsum("bi,oi->bo", x, m.w).square().mean(), w=_p(1024, 64)),
        "cat": lambda: Wrapped(
            lambda m, x: (x @ torch.cat([m.a, m.b], 1)).square().mean(), a=_p(64, 512), b=_p(64, 512)
        ),
        "sum": lambda: Wrapped(lambda m, x: x.square().mean() + m.w.sum(), w=_p(512, 512)),
        "added": lambda: Wrapped(
            lambda m, x: (x @ (m.a + m.b + m.c + m.d)).square().mean(), **{n: _p(64, 1024) for n in "abcd"}
        ),
        "expanded_bias": lambda: Wrapped(lambda m, x: (x + m.b.expand_as(x)).sum(), b=_p(1, 64)),
    },
    share=0.8,
)
def behind_a_chain(run: Run, make: Any) -> None:
    """The same behind layers that can be recomputed, at four fifths of eager's peak."""
    run.train(make(), lambda m, i: _backward(m, run.x(i)), steps=3)


@situation(share=0.8)
def gradient_of_the_input(run: Run) -> None:
    """The input's gradient is expanded: autograd copies it into a leaf as well."""

    def step(model: Any, i: int) -> Any:
        x = run.x(i).requires_grad_()
        (model(x) + x.sum()).backward()
        return x.grad

    run.train(Chain(), step)


@situation(share=0.8)
def summed_input(run: Run) -> None:
    """The model's own sum of its input: the gradient is expanded inside of the step."""

    def step(model: Any, i: int) -> Any:
        x = run.x(i).requires_grad_()
        model(x).backward()
        return x.grad

    run.train(Wrapped(lambda m, x: x.sum()), step)


@situation(share=0.9)
def channels_last_weights(run: Run) -> None:
    model = nn.Sequential(*[nn.Conv2d(16, 16, 3, padding=1) for _ in range(5)]).to(memory_format=torch.channels_last)

    def step(m: Any, i: int) -> Any:
        out = m(run.x(i, 8, 16, 24, 24).contiguous(memory_format=torch.channels_last))
        loss = out.square().mean()
        del out
        loss.backward()
        return loss.detach()

    run.train(model, step, gradients="all")


@situation(share=0.85)
def tied_through_a_view(run: Run) -> None:
    class Tied(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.features(x)
            return (x @ self.layers[0].weight.t() @ self.layers[1].weight[:, :32]).square().mean()

    run.train(Tied(), lambda m, i: _backward(m, run.x(i)))

"""Kernels that cannot be timed on made-up numbers, sparse gradients, gradients in the forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from situations.parts import Chain, Wrapped
from situations.registry import Refusal, situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


@situation(refused=Refusal("CaptureError", "autograd.grad|gradient"), either=True, share=1.1)
def grad_in_the_forward(run: Run) -> None:
    """Forces as gradients of an energy: ``torch.autograd.grad`` in the forward."""

    class Forces(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                energy = self.features(x).sum()
                (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force.square().mean()

    run.train(Forces(depth=3), lambda m, i: _loss(m, run.x(i)))


@situation(refused=Refusal("CaptureError", "autograd.grad|gradient"), either=True, share=1.1)
def grad_in_the_forward_detached(run: Run) -> None:
    """The same without a graph of its own."""

    class Weighted(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.features(x)
            (weight,) = torch.autograd.grad(out.square().sum(), out, retain_graph=True)
            return (out * weight.detach()).mean()

    run.train(Weighted(depth=3), lambda m, i: _loss(m, run.x(i)))


def _square(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x[:64] @ x[:64].t() / 64 + 3 * torch.eye(64)


ALGEBRA = {
    "solve": lambda m, x: torch.linalg.solve(_square(m, x), x[:64]).square().mean(),
    "logdet": lambda m, x: torch.logdet(_square(m, x)) / 64,
    "slogdet": lambda m, x: torch.linalg.slogdet(_square(m, x)).logabsdet / 64,
    "inv": lambda m, x: torch.linalg.inv(_square(m, x)).square().mean(),
    "cholesky": lambda m, x: torch.linalg.cholesky(_square(m, x)).square().mean(),
    "lu_solve": lambda m, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(_square(m, x)), x[:64]).square().mean(),
    "eigh": lambda m, x: torch.linalg.eigh(_square(m, x)).eigenvalues.square().mean(),
    "svd": lambda m, x: torch.linalg.svdvals(x[:64]).mean(),
    "qr": lambda m, x: torch.linalg.qr(x[:128])[1].abs().mean(),
    "matrix_exp": lambda m, x: torch.linalg.matrix_exp(_square(m, x) / 100).square().mean(),
}


@variants(ALGEBRA, share=1.02)
def algebra(run: Run, function: Any) -> None:
    """Kernels that cannot be timed on made-up numbers."""
    run.train(Wrapped(function, depth=4), lambda m, i: _loss(m, run.x(i)), steps=3)


def _ctc(m: Any, x: torch.Tensor) -> torch.Tensor:
    scores = x.view(128, 8, 64).log_softmax(-1)
    targets = torch.arange(8 * 20).view(8, 20) % 63 + 1
    return F.ctc_loss(scores, targets, torch.full((8,), 128), torch.full((8,), 20))


def _ctc_concatenated(m: Any, x: torch.Tensor) -> torch.Tensor:
    scores = x.view(128, 8, 64).log_softmax(-1)
    lengths = torch.arange(8) + 13
    return F.ctc_loss(scores, torch.arange(132) % 63 + 1, torch.full((8,), 128), lengths, zero_infinity=True)


CRITERIA = {
    "ctc": _ctc,
    "ctc_tuples": lambda m, x: F.ctc_loss(
        x.view(128, 8, 64).log_softmax(-1), torch.ones(8, 20, dtype=torch.long), (128,) * 8, (20,) * 8
    ),
    "nll": lambda m, x: F.nll_loss(x.log_softmax(-1), torch.arange(1024) % 64),
    "cross_entropy_ignored": lambda m, x: F.cross_entropy(x, torch.arange(1024) % 65 - 1, ignore_index=-1),
    "cross_entropy_smoothed": lambda m, x: F.cross_entropy(x, torch.arange(1024) % 64, label_smoothing=0.1),
    "multi_margin": lambda m, x: F.multi_margin_loss(x, torch.arange(1024) % 64),
    "cosine": lambda m, x: F.cosine_embedding_loss(x[:512], x[512:], torch.ones(512)),
}


@situation(share=2.0)
def criterion_ctc_of_concatenated_targets(run: Run) -> None:
    """Sizes that depend on lengths are taken at their largest, which is all targets in one row."""
    run.train(Wrapped(_ctc_concatenated, depth=4), lambda m, i: _loss(m, run.x(i)), steps=3)


@variants(CRITERIA, share=1.02)
def criterion(run: Run, function: Any) -> None:
    run.train(Wrapped(function, depth=4), lambda m, i: _loss(m, run.x(i)), steps=3)


@variants(
    {
        "lstsq": lambda m, x: torch.linalg.lstsq(x[:128], x[128:256]).solution.square().mean(),
        "gaussian_nll": lambda m, x: F.gaussian_nll_loss(x, torch.zeros_like(x), x.exp()),
    },
    share=1.02,
    refused=Refusal("CaptureError", "depends on data"),
    either=True,
)
def looks_at_data(run: Run, function: Any) -> None:
    """Functions of torch that look at numbers on their way: no single graph holds them."""
    run.train(Wrapped(function, depth=4), lambda m, i: _loss(m, run.x(i)), steps=3)


_SPARSE = Refusal("CaptureError|UsageError", "sparse")


@variants({"embedding": False, "bag": True}, refused=_SPARSE, either=True, share=1.2)
def sparse(run: Run, bag: Any) -> None:
    """``sparse=True``: planned, or refused by name."""

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: Any = (nn.EmbeddingBag if bag else nn.Embedding)(1000, 32, sparse=True)
            self.out = nn.Linear(32, 32)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(tokens)).square().mean()

    run.train(Looking(), lambda m, i: _loss(m, run.tokens(i, most=1000)))


@situation(refused=_SPARSE, either=True, share=1.2)
def sparse_product(run: Run) -> None:
    """A sparse matrix as a constant, as in graph networks."""
    indices = torch.stack([torch.arange(1024), (torch.arange(1024) * 7) % 1024])
    matrix = torch.sparse_coo_tensor(indices, torch.ones(1024), (1024, 1024)).coalesce()
    run.train(Wrapped(lambda m, x: torch.sparse.mm(matrix, x).square().mean()), lambda m, i: _loss(m, run.x(i)))

"""What eager computes in one call is one call of the captured step: the same bits, no more bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ebbtide
from ebbtide.capture.rules.eager_kernels import LEFT_IN_PYTHON, RESTORED
from ebbtide.torch_seams.dispatcher import python_kernels

LABELS = torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(0))
WINDOW = torch.hann_window(16)


class Each(nn.Module):
    """One function a parameter; returns the sum of all results."""

    def __init__(self, functions: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...]]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.functions = [function for function, _ in functions]
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for _, shape in functions)

    def forward(self, factor: Tensor) -> Tensor:
        results = [f(weight * factor).square().sum() for f, weight in zip(self.functions, self.weights, strict=True)]
        return torch.stack(results).sum()


def resized(*shape: int, **options: object) -> tuple[Callable[[Tensor], Tensor], tuple[int, ...]]:
    return lambda x: F.interpolate(x, **options), shape  # type: ignore[arg-type]


CALLS: dict[str, list[tuple[Callable[[Tensor], Tensor], tuple[int, ...]]]] = {
    "upsample": [
        resized(2, 3, 9, scale_factor=2, mode="linear"),
        resized(2, 3, 7, 8, scale_factor=2, mode="bilinear"),
        resized(2, 3, 7, 8, size=(11, 5), mode="bilinear", align_corners=True),
        resized(2, 3, 7, 8, size=(5, 5), mode="bilinear", antialias=True),
        resized(2, 3, 7, 8, scale_factor=1.7, mode="bicubic"),
        resized(2, 3, 7, 8, size=(5, 5), mode="bicubic", antialias=True),
        resized(2, 3, 4, 5, 3, scale_factor=2, mode="trilinear"),
        *(resized(2, 3, *[4] * n, scale_factor=2, mode="nearest") for n in (1, 2, 3)),
        *(resized(2, 3, *[4] * n, size=[7] * n, mode="nearest-exact") for n in (1, 2, 3)),
        (
            lambda x: F.interpolate(x.to(memory_format=torch.channels_last), scale_factor=2, mode="bilinear"),
            (2, 4, 5, 5),
        ),
    ],
    "shrink": [(F.hardshrink, (30,)), (F.softshrink, (30,))],
    "margin": [
        (lambda x: F.multi_margin_loss(x, LABELS), (6, 5)),
        (lambda x: F.multilabel_margin_loss(x, torch.tensor([[1, 2, -1, 0, 0]] * 6)), (6, 5)),
    ],
    "addc": [
        (lambda x: torch.addcdiv(x, x, x + 9, value=0.3), (31,)),
        (lambda x: x.clone().addcdiv_(x, x + 9, value=0.3), (31,)),
        (lambda x: x.clone().addcmul_(x, x + 9, value=0.3), (31,)),
    ],
    "matmul": [
        (lambda x: x @ x[0], (3, 5, 5)),
        (lambda x: x @ x[:, :1].mT, (2, 3, 5, 5)),
        (lambda x: x[0] @ x, (4, 4)),
    ],
    "_fft": [(lambda x: torch.stft(x, 16, window=WINDOW, return_complex=True).abs(), (2, 100))],
}
"""By what the names of their operators have in common; a matrix product is as eager folds it, ``mm`` or ``bmm``."""


@pytest.mark.parametrize("name", CALLS)
def test_what_eager_calls_is_what_is_captured(name: str) -> None:
    fitted = Each(CALLS[name])
    plain = copy.deepcopy(fitted)
    ebbtide.fit(fitted, "1GiB", options=ebbtide.Options(effort=50))
    factor = torch.ones(())
    losses = [model(factor) for model in (fitted, plain)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for position, (ours, theirs) in enumerate(zip(fitted.parameters(), plain.parameters(), strict=True)):
        assert torch.equal(ours.grad, theirs.grad), f"gradient {position}"  # type: ignore[arg-type]
    plan = ebbtide.plan_of(fitted)
    assert plan is not None
    targets = [
        op.target for op in plan.program.ops if not op.target.startswith(("aten.mul.", "aten.pow.", "aten.sum."))
    ]
    calls = [each for each in targets if name in each]
    assert name == "matmul" or len(calls) >= len(CALLS[name]), f"taken apart: {targets}"


OF_SOME_RELEASES = {"one_hot.default", "_upsample_lanczos2d_aa.vec", "to_dense.default"}
"""Kernels in Python that came after torch 2.11."""


def test_every_kernel_of_torch_in_python_is_restored_or_left_for_a_reason() -> None:
    # Inductor's decompositions, which others may have imported, add one for cards that Ebbtide does not plan for.
    kernels = python_kernels() - {"miopen_batch_norm.default"}
    assert not kernels - set(RESTORED) - LEFT_IN_PYTHON
    assert {*RESTORED, *LEFT_IN_PYTHON} - kernels <= OF_SOME_RELEASES, "nothing is to be restored, or left"


def test_bits_do_not_depend_on_how_many_shapes_a_capture_serves() -> None:
    weight = nn.Linear(3, 3)

    class Resizing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = copy.deepcopy(weight)

        def forward(self, x: Tensor) -> Tensor:
            mixed = self.first(x).permute(0, 3, 1, 2)
            return F.interpolate(mixed, scale_factor=2, mode="bilinear").square().sum()

    fitted, plain = Resizing(), Resizing()
    ebbtide.fit(fitted, "1GiB", options=ebbtide.Options(effort=50))
    for size in (5, 6, 7, 8, 9):
        x = torch.randn(2, size, size, 3)
        for model in (fitted, plain):
            model.zero_grad()
            model(x).backward()
        assert torch.equal(fitted.first.weight.grad, plain.first.weight.grad), size  # type: ignore[arg-type]

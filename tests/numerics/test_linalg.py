"""Factorisations: their numbers are eager's, and so is the error where a matrix cannot be factored."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ebbtide


class Factored(nn.Module):
    """What a function makes of a matrix that is far from singular for small inputs."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0)))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight @ self.weight.mT + x).square().sum()


_older_cholesky = torch.cholesky if isinstance(torch.cholesky, types.BuiltinFunctionType) else torch.linalg.cholesky
"""Up to torch 2.13 an operator of its own; from 2.14 on a function that does nothing but raise."""


def every(matrix: Tensor) -> Tensor:
    linalg = torch.linalg
    factors, pivots = linalg.lu_factor(matrix)
    results = [
        linalg.cholesky(matrix),
        _older_cholesky(matrix),
        linalg.inv(matrix),
        linalg.solve(matrix, matrix[..., :2]),
    ]
    results += [linalg.lu_solve(factors, pivots, matrix), torch.cholesky_inverse(linalg.cholesky(matrix))]
    return torch.cat(results, -1) + torch.logdet(matrix)[:, None, None] + linalg.det(matrix)[:, None, None]


def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def test_factorisations_have_the_bits_of_eager() -> None:
    plain = Factored(every)
    fitted = ebbtide.fit(copy.deepcopy(plain), "1MiB", options=ebbtide.Options(effort=50))
    for _ in range(2):
        for ours, theirs in zip(step(fitted, 3 * torch.eye(5)), step(plain, 3 * torch.eye(5)), strict=True):
            assert torch.equal(ours, theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [torch.linalg.cholesky, torch.linalg.inv], ids=["cholesky", "inv"])
def test_a_matrix_that_cannot_be_factored_raises_as_in_eager_and_the_next_step_is_right(
    function: Callable[[Tensor], Tensor],
) -> None:
    plain = Factored(function)
    fitted = ebbtide.fit(copy.deepcopy(plain), "1MiB", options=ebbtide.Options(effort=50))
    step(fitted, 3 * torch.eye(5))
    worst = -(plain.weight @ plain.weight.mT)[:1].detach()
    messages = []
    for model in (fitted, plain):
        with pytest.raises(torch.linalg.LinAlgError) as caught:
            model(worst)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    for ours, theirs in zip(step(fitted, 3 * torch.eye(5)), step(plain, 3 * torch.eye(5)), strict=True):
        assert torch.equal(ours, theirs)  # type: ignore[arg-type]

"""Derivatives that no step has are refused by name; those that are not taken do no harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import ebbtide
from ebbtide.errors import CaptureError

X, V = torch.randn(3, 4), torch.randn(3, 4)


def fitted() -> nn.Module:
    return ebbtide.fit(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "1GiB")


def functional(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda parameters, x: torch.func.functional_call(model, parameters, (x,)).square().mean()


def detached(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in model.named_parameters()}


def dual(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(X, V))


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: torch.func.grad(functional(m))(detached(m), X),
    "vmap": lambda m: torch.func.vmap(m)(X[:, None]),
    "per-sample gradients": lambda m: torch.func.vmap(torch.func.grad(functional(m)), (None, 0))(detached(m), X),
    "jvp": lambda m: torch.func.jvp(m, (X,), (V,)),
    "jacrev": lambda m: torch.func.jacrev(m)(X),
    "jacfwd": lambda m: torch.func.jacfwd(m)(X),
    "forward-mode": dual,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")  # torch's own, on the first use of jvp
@pytest.mark.parametrize("name", WAYS)
def test_transforms_are_refused_by_name(name: str) -> None:
    model = fitted()
    with pytest.raises(CaptureError, match=r"(?s)unfit.*inside of (torch\.func|forward-mode)"):
        WAYS[name](model)
    model(X).sum().backward()


def test_second_derivatives_are_refused_where_they_are_taken() -> None:
    model = fitted()
    x = X.clone().requires_grad_(True)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert torch.isfinite(gradient).all()
        with pytest.raises(CaptureError, match=r"second derivative.*create_graph"):
            gradient.square().mean().backward()
    with pytest.raises(CaptureError, match="second derivative"):
        torch.autograd.functional.hessian(lambda x: model(x).sum(), X[:1])


def test_a_graph_of_gradients_that_nobody_uses_does_no_harm() -> None:
    model, x = fitted(), X.clone().requires_grad_(True)
    for _ in range(3):
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        expected = torch.autograd.grad(torch.tanh(model[0](x)).sum(), x)[0]  # type: ignore[operator]
        assert torch.equal(gradient, expected)
    assert ebbtide.plan_of(model) is not None


def test_parameters_that_somebody_computed_give_no_warning() -> None:
    model = fitted()
    scaled = {name: each * 1.5 for name, each in model.named_parameters()}
    torch.func.functional_call(model, scaled, (X,)).square().mean().backward()
    assert all(each.grad is not None for each in model.parameters())

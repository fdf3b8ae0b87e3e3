"""Weights of quantizing libraries, as they are built: a parameter's subclass with its scale, dequantized in a function.

Neither bitsandbytes nor torchao is a dependency; these are made as theirs are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import ebbtide
from ebbtide.errors import CaptureError


class Int8(nn.Parameter):
    """As bitsandbytes' ``Int8Params``: bytes, and how to read them as an attribute."""

    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_subclass(cls, data, False)
        made.scale = scale
        return made


class MatMul(torch.autograd.Function):
    """Dequantizes in the forward, and again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        return F.linear(x, weight.to(x.dtype) * scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight, scale = ctx.saved_tensors
        return gradient @ (weight.to(gradient.dtype) * scale), None, None


class Adapted(nn.Module):
    """QLoRA: a frozen layer of bytes with an adapter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        bytes_ = torch.randint(-127, 127, (width, width), dtype=torch.int8)
        self.weight: Any = Int8(bytes_, torch.tensor(0.01))
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MatMul.apply(x, self.weight, self.weight.scale) + self.up(self.down(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def trained(*, fitted: bool) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(1)
    model = Net()
    if fitted:
        ebbtide.fit(model, "80%", progress=None)
    left: list[torch.Tensor] = []
    for _ in range(3):
        model.zero_grad()
        loss = model(torch.randn(128, 32))
        loss.backward()
        left += [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]
    return model, left


def test_a_subclass_of_bytes_is_planned_with_eagers_bits() -> None:
    (model, ours), (_, theirs) = trained(fitted=True), trained(fitted=False)
    assert len(ours) == len(theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert ebbtide.calls_of(model).planned == 3


class Wrapping(torch.Tensor):
    """As torchao's: a tensor around a tensor, with a dispatch of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Wrapping:
        return Wrapping(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*tree_map(lambda each: each.inner if isinstance(each, cls) else each, args), **(kwargs or {}))
        keeps = func in (torch.ops.aten.detach.default, torch.ops.aten.t.default, torch.ops.aten.alias.default)
        return cls(found) if keeps else found


def wrapped(*, fitted: bool) -> torch.Tensor | None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight = nn.Parameter(Wrapping(torch.randn(8, 8)), requires_grad=False)
    if fitted:
        ebbtide.fit(model, "1MiB", progress=None)
    model(torch.randn(4, 8)).sum().backward()
    return model[1].weight.grad


class Scaled(torch.Tensor):
    """As torchao's ``Int8Tensor``: a tensor around two, which is dequantized wherever it is read."""

    @staticmethod
    def __new__(cls, bytes_: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, bytes_.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, bytes_: torch.Tensor, scale: torch.Tensor) -> None:
        self.bytes_, self.scale = bytes_, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["bytes_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["bytes_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].bytes_, args[0].scale)
        plain = tree_map(lambda each: each.bytes_ * each.scale if isinstance(each, cls) else each, args)
        return func(*plain, **(kwargs or {}))


def test_a_tensor_around_several_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight = nn.Parameter(Scaled(torch.ones(8, 8, dtype=torch.int8), torch.tensor(0.1)), requires_grad=False)
    model(torch.randn(4, 8)).sum().backward()
    ebbtide.fit(model, "1MiB", progress=None)
    with pytest.raises(CaptureError, match=r"wraps several others \(Scaled\)"):
        model(torch.randn(4, 8))
    assert not ebbtide.calls_of(model).planned


class Outer(Scaled):
    """As torchao's ``AffineQuantizedTensor``: around one tensor, which is around two."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @property
    def inner(self) -> Scaled:
        return Scaled(self.bytes_, self.scale)


def test_a_tensor_around_several_is_refused_before_anything_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing such a one may crash: kernels of what it wraps run while they are described."""
    monkeypatch.setattr("ebbtide.torch_seams.compile_mode.OwnCompileMode.compiling", lambda *_: pytest.fail("traced"))
    for kind in (Scaled, Outer):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        weight = kind(torch.ones(8, 8, dtype=torch.int8), torch.tensor(0.1))
        model[0].weight = nn.Parameter(weight, requires_grad=False)
        ebbtide.fit(model, "1MiB", progress=None)
        with pytest.raises(CaptureError, match=rf"wraps several others \({kind.__name__}\)"):
            model(torch.randn(4, 8))


def test_a_tensor_around_a_tensor_is_refused_and_nothing_runs_unplanned() -> None:
    assert wrapped(fitted=False) is not None
    with pytest.raises(CaptureError):
        wrapped(fitted=True)

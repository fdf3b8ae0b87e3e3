"""Models that are made without memory may be converted, moved and tied as with memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.capture.without_memory import without_memory


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU())
        self.cells = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.cells(self.words(tokens))
        return self.head(self.middle(hidden.flatten(0, 1))).float().square().mean()


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "to": (lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "half": (lambda model: model.half(), torch.float16),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
    "double": (lambda model: model.double(), torch.float64),
    "there and back": (lambda model: model.half().float(), torch.float32),
    "nothing to do": (lambda model: model.to(torch.float32), torch.float32),
    "a part": (lambda model: model.middle.half() and model.float(), torch.float32),
    "a device": (lambda model: model.to("cpu").cpu(), torch.float32),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_without_memory(name: str) -> None:
    convert, dtype = CONVERSIONS[name]
    with without_memory():
        model = Tied()
        model.middle[0].requires_grad_(False)
        converted = convert(model)
        tokens = torch.zeros(4, 6, dtype=torch.long)
    assert converted is model
    expected = convert(Tied())
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in expected.named_parameters()
    }
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert {n: b.dtype for n, b in model.named_buffers()} == {n: b.dtype for n, b in expected.named_buffers()}
    assert model.head.weight is model.words.weight
    assert not any(each.requires_grad for each in model.middle[0].parameters())
    assert isinstance(model.head.weight, nn.Parameter)
    assert all(isinstance(each, nn.Parameter) for each in model.cells.parameters())
    plan = ebbtide.plan(model, (tokens,), budget="100%", machine="h100-80gb", options=ebbtide.Options(progress=None))
    sizes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert plan.resident_bytes >= sizes


def test_models_with_memory_are_converted_as_ever() -> None:
    before = nn.Module._apply
    real = Tied()
    weight = real.head.weight
    with without_memory():
        pass
    assert nn.Module._apply is before
    assert real.half().head.weight is weight
    assert weight.dtype is torch.float16


@pytest.mark.parametrize("std", [0.02, 40.0], ids=["most within the limits", "few within them"])
def test_truncated_normals_without_memory(std: float) -> None:
    """They are drawn again until all are within their limits, which nobody can see here."""

    def made() -> nn.Linear:
        layer = nn.Linear(8, 8)
        nn.init.trunc_normal_(layer.weight, std=std)
        return layer

    with without_memory():
        layer = made()
    assert layer.weight.shape == (8, 8)
    assert isinstance(layer.weight, nn.Parameter)
    assert made().weight.abs().max() <= 2, "as ever outside"


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_on_meta_is_traced_as_on_a_device(inside: bool) -> None:
    """On ``meta`` itself the loss would have no gradient, and the attention before it none either."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
            self.queries = nn.Linear(32, 32)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens)
            heads = self.queries(x).unflatten(-1, (2, 16)).transpose(1, 2)
            x = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            logits = self.head(x.transpose(1, 2).flatten(2))
            return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def made() -> tuple[nn.Module, torch.Tensor]:
        with torch.device("meta"):
            return Attends(), torch.zeros(2, 24, dtype=torch.long)

    if inside:
        with without_memory():
            model, tokens = made()
    else:
        model, tokens = made()
    plan = ebbtide.plan(model, (tokens,), budget="100%", machine="h100-80gb", options=ebbtide.Options(progress=None))
    on_device = ebbtide.plan(Attends(), (torch.zeros(2, 24, dtype=torch.long),), budget="100%", machine="h100-80gb")
    assert [op.target for op in plan.program.ops] == [op.target for op in on_device.program.ops]
    assert plan.predicted_peak_bytes == on_device.predicted_peak_bytes

"""The program of a model with many layers from those with few: exact where layers are alike, no answer elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide import zoo
from ebbtide._api import estimate
from ebbtide._api.estimate import AheadStep, capture_ahead
from ebbtide.capture.few_layers import LEAST_LAYERS, repeated_layers
from ebbtide.case import Case
from ebbtide.errors import CaptureError
from ebbtide.options import Options
from ebbtide.planning.alternatives import Alternative
from ebbtide.step.layers import Layers, grown
from ebbtide.zoo import GPTConfig, gpt

COUNT = LEAST_LAYERS
LAYERS = Layers(3, 5, 12)


def rows(layers: int, row: Callable[[int], str]) -> list[tuple[str, int]]:
    return [("begin", 0), *((row(layer), 1) for layer in range(layers)), (f"end {layers}", 0)]


def test_numbers_go_on_as_they_began() -> None:
    def numbered(layers: int) -> list[tuple[str, int]]:
        return rows(layers, lambda layer: f"op_{2 * layer + layers} of layers.{layer}")

    assert grown(numbered(3), numbered(5), LAYERS) == numbered(12)


@pytest.mark.parametrize(
    "row",
    [lambda layer: f"op_{layer**2}", lambda layer: f"op_{layer % 2}", lambda layer: f"op_0{layer}"],
    ids=["square", "in turns", "leading zero"],
)
def test_what_does_not_go_on_regularly_has_no_answer(row: Callable[[int], str]) -> None:
    assert grown(rows(3, row), rows(5, row), LAYERS) is None


def test_the_first_and_the_last_layer_may_be_others() -> None:
    def numbered(layers: int) -> list[tuple[str, int]]:
        return rows(layers, lambda layer: "first" if not layer else "last" if layer == layers - 1 else f"op_{layer}")

    assert grown(numbered(3), numbered(5), LAYERS) == numbered(12)


def ahead(case: Case) -> AheadStep:
    options = Options(machine="a100-40gb", progress=None)
    return capture_ahead(case.model, case.args, case.kwargs, options=options, name="case")


@contextmanager
def as_a_whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(estimate, "repeated_layers", lambda _: None)
        yield


def alternatives_of(step: AheadStep) -> list[Alternative]:
    assert step.alternatives is not None
    return [*step.alternatives]


class Encoder(nn.Module):
    """What is written over in place has a number of places that grows with the layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, COUNT, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


CASES: dict[str, Callable[[], Case]] = {
    "gpt": lambda: gpt(2, GPTConfig(vocabulary=512, length=32, layers=COUNT, width=32, heads=2)),
    "llama": lambda: zoo.build("llama_small", 1, layers=COUNT, length=64),
    "encoder": lambda: Case(Encoder(), (torch.randn(4, 32, 32),)),
    "hf_bert": lambda: zoo.build("hf_bert", 2, layers=COUNT),
}


@pytest.mark.parametrize("name", CASES)
def test_program_and_alternatives_are_those_of_the_whole_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]()
    mine = ahead(case)
    assert f"of {COUNT} layers;" in mine.provenance.estimate
    with as_a_whole(monkeypatch):
        theirs = ahead(case)
    assert " layers;" not in theirs.provenance.estimate
    assert mine.program == theirs.program
    assert replace(mine.provenance, estimate="") == replace(theirs.provenance, estimate="")
    assert (mine.resident_bytes, mine.reserve_bytes, mine.end) == (
        theirs.resident_bytes,
        theirs.reserve_bytes,
        theirs.end,
    )
    # Which places are worth a rewrite is a share of the step: of a short one there may be more.
    monkeypatch.setattr(estimate, "capture_program", lambda *_, **__: pytest.fail("captured as a whole after all"))
    known = {each.rewrites: each for each in alternatives_of(mine)}
    for each in alternatives_of(theirs)[::5]:
        assert known[each.rewrites].estimated == each.estimated
        assert known[each.rewrites].costed() == each.costed()


class Block(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 16), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.relu(self.linear(x))


class Stack(nn.Module):
    def __init__(self, scales: list[float], readout: str = "last") -> None:
        super().__init__()
        self.blocks, self.readout = nn.ModuleList(map(Block, scales)), readout
        self.head = nn.Linear(16, 4) if readout == "a head on a late one" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        more = x.new_zeros(())
        for index, block in enumerate(self.blocks):
            x = block(x)
            seen.append(x)
            if self.head is not None and index == COUNT - 3:
                more = self.head(x).square().sum()
        if self.readout == "named":
            return self.blocks[COUNT - 1].linear(x).sum()  # type: ignore[union-attr]
        return more + (torch.stack(seen).mean(0) if self.readout == "mean" else x).sum()


@pytest.mark.parametrize(
    ("scales", "readout"),
    [
        ([0.1 * (1 + each) for each in range(COUNT)], "last"),
        ([0.5] * (COUNT - 3) + [0.25] * 3, "last"),
        ([0.5] * (COUNT - 1) + [0.25], "last"),
        ([0.5] * COUNT, "mean"),
        ([0.5] * COUNT, "named"),
        ([0.5] * COUNT, "a head on a late one"),
    ],
    ids=[
        "another scale in each",
        "late ones differ",
        "the last differs",
        "an op reads all",
        "by number",
        "a late head",
    ],
)
def test_other_models_are_captured_as_a_whole(scales: list[float], readout: str) -> None:
    model = Stack(scales, readout)
    blocks = model.blocks
    step = ahead(Case(model, (torch.randn(4, 16),)))
    assert " layers;" not in step.provenance.estimate
    assert len([op for op in step.program.ops if "relu.default" in op.target]) == COUNT
    assert model.blocks is blocks
    assert len(model.blocks) == COUNT


def test_a_model_has_its_layers_again_when_its_forward_raises() -> None:
    model = Stack([0.5] * COUNT)
    model.register_buffer("shift", torch.zeros(3))
    model.forward = lambda x: x + model.shift  # type: ignore[method-assign]
    with pytest.raises((CaptureError, RuntimeError)):
        ahead(Case(model, (torch.randn(4, 16),)))
    assert len(model.blocks) == COUNT


def alike(count: int = COUNT) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(count)]


def numbered(name: str, at: Callable[[int], Any]) -> list[nn.Module]:
    layers = alike()
    for position, each in enumerate(layers):
        setattr(each, name, at(position))
    return layers


def hooked() -> list[nn.Module]:
    layers = alike()
    layers[COUNT - 2].register_forward_hook(lambda module, args, output: output)
    return layers


@pytest.mark.parametrize(
    ("layers", "count"),
    [
        (alike(), COUNT),
        ([nn.Linear(3, 2), *alike(COUNT - 1)], COUNT),
        (numbered("index", lambda position: position), COUNT),
        (numbered("told", lambda position: {"name": f"layers.{position}.mlp"}), COUNT),
        ([*alike(COUNT - 1), nn.Linear(2, 3)], None),
        (numbered("window", lambda position: 4 if position == 7 else None), None),
        (numbered("window", lambda position: position > 5), None),
        (numbered("told", lambda position: {"name": f"layers.{position // 2}"}), None),
        (numbered("scale", lambda position: torch.ones(1)), None),
        (hooked(), None),
        (alike(COUNT - 1), None),
    ],
    ids=["alike", "another first", "numbers", "names", "another last", "window", "flags", "other names", "tensors",
         "a hook", "too few"],
)  # fmt: skip
def test_which_layers_are_repeated(layers: list[nn.Module], count: int | None) -> None:
    found = repeated_layers(nn.Sequential(nn.ModuleList(layers)))
    assert (None if found is None else found.count) == count
    if found is not None:
        keys = list(found.container._modules)
        with found.first(3):
            assert list(found.container) == layers[:3]
        assert list(found.container._modules) == keys
        assert list(found.container) == layers

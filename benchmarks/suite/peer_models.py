"""The models on which PyTorch's means are compared: a step of a tenth of a second on one core, random weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ebbtide import Case, zoo
from ebbtide.zoo import GPTConfig
from ebbtide_published.zoo.fcn import fcn8
from ebbtide_published.zoo.mobilenet import mobilenet
from ebbtide_published.zoo.transformer import TransformerConfig, transformer_base
from suite.subject import Subject, checkpoint_lists

__all__ = ["MODELS"]


class _Chain(nn.Module):
    """Linear layers with GELUs, each pair a block."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _chain() -> Case:
    return Case(_Chain(64, 96), (torch.randn(1024, 96),), name="chain-64")


def _gpt(layers: int, dropout: float) -> Case:
    return zoo.gpt(4, GPTConfig(vocabulary=512, length=128, layers=layers, width=128, heads=4, dropout=dropout))


def _subject(make: Callable[[], Case], lists: tuple[str, ...]) -> Subject:
    """The case called by keywords, the blocks of its ``lists`` being what its users put under a checkpoint each."""
    case = make()
    names = inspect.signature(case.model.forward).parameters
    kwargs = dict(zip(names, case.args, strict=False)) | dict(case.kwargs or {})
    return Subject(case.model.train(), kwargs, partial(checkpoint_lists, names=lists))


_TRANSFORMER = TransformerConfig(vocabulary=512, layers=2, width=128, hidden=512, heads=4)
_HUGGING = {"vocabulary": 1024, "length": 128, "width": 128, "heads": 4}

MODELS: dict[str, Callable[[], Subject]] = {
    "chain-64": partial(_subject, _chain, ("layers",)),
    "gpt-12L": partial(_subject, partial(_gpt, 12, 0.0), ("blocks",)),
    "gpt-8L dropout": partial(_subject, partial(_gpt, 8, 0.1), ("blocks",)),
    "mobilenet": partial(_subject, partial(mobilenet, 8, image=64, width=24, classes=10), ("features",)),
    "unet": partial(_subject, partial(zoo.unet, 2, image=96, width=16), ("down", "merge")),
    "bert-4L": partial(_subject, partial(zoo.hf_bert, 4, layers=4, **_HUGGING), ("layer",)),
    "llama-4L": partial(_subject, partial(zoo.hf_llama, 4, layers=4, **_HUGGING), ("layers",)),
    "fcn8": partial(_subject, partial(fcn8, 2, image=128, width=16, hidden=64), ("stages",)),
    "transformer-2L": partial(
        _subject, partial(transformer_base, 8, length=64, config=_TRANSFORMER), ("encoder", "decoder")
    ),
    "resnet50": partial(_subject, partial(zoo.resnet50, 4, image=64, width=16, classes=10), ("stages",)),
    "t5-2L": partial(_subject, partial(zoo.hf_t5, 4, layers=2, **_HUGGING), ("block",)),
}
"""By name; with batch norm and dropout where the models of the papers and libraries have them."""

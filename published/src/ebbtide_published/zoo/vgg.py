"""VGG (Simonyan and Zisserman 2015, configurations D and E): 3x3 convolutions in five stages, three linear layers.

The first linear layer takes the last stage's planes whole, so its size goes with the image's; at 224 x 224 it is the
paper's. (torchvision pools to 7 x 7 instead, which is the same there and not deterministic on CUDA elsewhere.)
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.case import Case
from ebbtide.zoo.inputs import ImageSize, image_batch, integers

__all__ = ["VGG", "VGG16", "VGG19", "stage", "stage_channels", "vgg16", "vgg19"]

VGG16 = (2, 2, 3, 3, 3)
"""Convolutions per stage of configuration D."""
VGG19 = (2, 2, 4, 4, 4)
"""Convolutions per stage of configuration E."""


def stage_channels(width: int) -> tuple[int, ...]:
    """Channels of the five stages, ``width`` in the first: doubled three times, then kept."""
    return (width, 2 * width, 4 * width, 8 * width, 8 * width)


def stage(inputs: int, outputs: int, count: int, *, norm: bool = False) -> nn.Sequential:
    """``count`` times a 3x3 convolution, batch norm if ``norm``, and a ReLU in place."""
    layers = nn.Sequential()
    for index in range(count):
        layers.append(nn.Conv2d(outputs if index else inputs, outputs, 3, padding=1))
        if norm:
            layers.append(nn.BatchNorm2d(outputs))
        layers.append(nn.ReLU(inplace=True))
    return layers


class VGG(nn.Module):
    """Five stages with a max-pool behind each, then the classifier; the forward returns the loss.

    Args:
        counts: convolutions per stage.
        pixels: height times width behind the last stage, a 1024th of the image's.
        width: channels of the first stage.
        hidden: size of the two hidden linear layers.
        dropout: probability behind each hidden linear layer.
        classes: number of labels.
    """

    def __init__(
        self,
        counts: tuple[int, ...],
        *,
        pixels: int = 49,
        width: int = 64,
        hidden: int = 4096,
        dropout: float = 0.5,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential()
        inputs = 3
        for outputs, count in zip(stage_channels(width), counts, strict=True):
            self.features.extend([*stage(inputs, outputs, count), nn.MaxPool2d(2)])
            inputs = outputs
        self.classifier = nn.Sequential(
            nn.Linear(inputs * pixels, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        self.apply(_initialize)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of ``labels``, shape ``(batch,)``, given ``images``, ``(batch, 3, height, width)``."""
        return F.cross_entropy(self.classifier(self.features(images).flatten(1)), labels)


def _initialize(module: nn.Module) -> None:
    """Scaled normal convolutions, normal linear layers of deviation 0.01, zero biases (torchvision)."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def vgg16(batch: int = 8, *, image: ImageSize = 96, width: int = 64, hidden: int = 4096, classes: int = 1000) -> Case:
    """A training call of VGG-16 on ``batch`` random images of ``image`` pixels; the paper's are 224 x 224."""
    return _case("vgg16", VGG16, batch, image, width, hidden, classes)


def vgg19(batch: int = 8, *, image: ImageSize = 96, width: int = 64, hidden: int = 4096, classes: int = 1000) -> Case:
    """A training call of VGG-19 on ``batch`` random images of ``image`` pixels; the paper's are 224 x 224."""
    return _case("vgg19", VGG19, batch, image, width, hidden, classes)


def _case(
    name: str, counts: tuple[int, ...], batch: int, image: ImageSize, width: int, hidden: int, classes: int
) -> Case:
    images = image_batch(batch, image, multiple=32)
    height, across = images.shape[2:]
    model = VGG(counts, pixels=height * across // 1024, width=width, hidden=hidden, classes=classes)
    return Case(model, (images, integers(classes, batch)), name=f"{name}-w{width}-{height}x{across}-b{batch}")

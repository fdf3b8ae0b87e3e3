"""DenseNet with bottlenecks and compression (Huang et al. 2017): every layer reads all layers before it.

Each layer concatenates its inputs anew, as torchvision's does; keeping all those copies costs the square of the depth,
which made this network the first argument for recomputation in practice (Pleiss et al. 2017).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.case import Case
from ebbtide.zoo.inputs import ImageSize, image_batch, integers

__all__ = ["DenseNet", "densenet121"]

_BOTTLENECK = 4  # inner channels of a layer per channel that it adds (Huang et al. 2017, section 3)


class DenseLayer(nn.Module):
    """Adds ``growth`` channels: batch norm, ReLU, 1x1 convolution, batch norm, ReLU, 3x3 convolution."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        inner = _BOTTLENECK * growth
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, inner, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(inner), nn.Conv2d(inner, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Planes of equal size, concatenated as channels, to ``(batch, growth, height, width)``."""
        x = self.conv1(self.relu(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu(self.norm2(x)))


class DenseBlock(nn.Module):
    """Layers that each read the block's input and all layers before; returns everything concatenated."""

    def __init__(self, inputs: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + index * growth, growth) for index in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape ``(batch, inputs, height, width)`` to ``(batch, inputs + layers * growth, height, width)``."""
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """A 7x7 stem, dense blocks with a halving transition between, and a linear head; the forward returns the loss.

    Args:
        layers: number of layers per block.
        growth: channels that a layer adds; the stem has twice as many.
        classes: number of labels.
    """

    def __init__(self, layers: tuple[int, ...], *, growth: int = 32, classes: int = 1000) -> None:
        super().__init__()
        channels = 2 * growth
        self.features = nn.Sequential(
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        for index, count in enumerate(layers):
            if index:
                self.features.extend(_transition(channels))
                channels //= 2
            self.features.append(DenseBlock(channels, growth, count))
            channels += count * growth
        self.features.extend([nn.BatchNorm2d(channels), nn.ReLU(inplace=True)])
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of ``labels``, shape ``(batch,)``, given ``images``, ``(batch, 3, height, width)``."""
        return F.cross_entropy(self.head(self.pool(self.features(images)).flatten(1)), labels)


def _transition(channels: int) -> list[nn.Module]:
    """Half the channels, half the height and width."""
    halve = nn.Conv2d(channels, channels // 2, 1, bias=False)
    return [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), halve, nn.AvgPool2d(2)]


def densenet121(batch: int = 4, *, image: ImageSize = 128, growth: int = 32, classes: int = 1000) -> Case:
    """A training call of DenseNet-121 on ``batch`` random images of ``image`` pixels; the paper's are 224 x 224."""
    images = image_batch(batch, image, multiple=32)
    height, across = images.shape[2:]
    model = DenseNet((6, 12, 24, 16), growth=growth, classes=classes)
    return Case(model, (images, integers(classes, batch)), name=f"densenet121-g{growth}-{height}x{across}-b{batch}")

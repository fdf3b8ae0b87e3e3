"""MobileNet v1 (Howard et al. 2017, table 1): depthwise separable convolutions, as in Checkmate's experiments."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.case import Case
from ebbtide.zoo.inputs import ImageSize, image_batch, integers

__all__ = ["MobileNet", "mobilenet"]

# Outputs, as multiples of the stem's channels, and stride of each separable convolution (table 1).
_LAYERS = ((2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2), *((16, 1),) * 5, (32, 2), (32, 1))


def _normed(convolution: nn.Conv2d) -> nn.Sequential:
    """The convolution, batch norm and a ReLU in place."""
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU(inplace=True))


class MobileNet(nn.Module):
    """A stem, thirteen separable convolutions, a global mean and a linear head; the forward returns the loss.

    Args:
        width: channels of the stem, 32 times the paper's width multiplier.
        classes: number of labels.
    """

    def __init__(self, *, width: int = 32, classes: int = 1000) -> None:
        super().__init__()
        self.features = _normed(nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False))
        inputs = width
        for multiple, stride in _LAYERS:
            depthwise = nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False)
            pointwise = nn.Conv2d(inputs, multiple * width, 1, bias=False)
            self.features.extend([_normed(depthwise), _normed(pointwise)])
            inputs = multiple * width
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(inputs, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of ``labels``, shape ``(batch,)``, given ``images``, ``(batch, 3, height, width)``."""
        return F.cross_entropy(self.head(self.pool(self.features(images)).flatten(1)), labels)


def mobilenet(batch: int = 8, *, image: ImageSize = 128, width: int = 32, classes: int = 1000) -> Case:
    """A training call of MobileNet v1 on ``batch`` random images of ``image`` pixels; the paper's are 224 x 224."""
    images = image_batch(batch, image, multiple=32)
    height, across = images.shape[2:]
    model = MobileNet(width=width, classes=classes)
    return Case(model, (images, integers(classes, batch)), name=f"mobilenet-w{width}-{height}x{across}-b{batch}")

"""ResNet-152 as Echo's own test has it: batch norm and ReLU before each convolution (He et al., ECCV 2016).

The network of ``example/image-classification/symbols/resnet.py`` in MXNet, which ``test_resnet152`` of its pull request
18228 binds at 32 images of 224 x 224: what is added to a block's shortcut is a convolution's own output, and the first
unit of each stage takes its shortcut behind the first ReLU. The zoo's ResNets are torchvision's, with batch norm and
ReLU behind.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide import Case
from ebbtide.zoo.inputs import image_batch, integers

__all__ = ["preactivation_resnet152"]

_UNITS = (3, 8, 36, 3)
_FILTERS = (256, 512, 1024, 2048)
_EPSILON = 2e-5


class _Unit(nn.Module):
    """Three convolutions, each behind batch norm and ReLU, added to the shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, matches: bool) -> None:
        super().__init__()
        inner = outputs // 4
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs, _EPSILON), nn.Conv2d(inputs, inner, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner, _EPSILON)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.norm3, self.conv3 = nn.BatchNorm2d(inner, _EPSILON), nn.Conv2d(inner, outputs, 1, bias=False)
        self.shortcut = None if matches else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.norm1(x))
        out = self.conv1(first)
        out = self.conv2(F.relu(self.norm2(out)))
        out = self.conv3(F.relu(self.norm3(out)))
        return out + (x if self.shortcut is None else self.shortcut(first))


class _ResNet(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.BatchNorm2d(3, _EPSILON),
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64, _EPSILON),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.units = nn.Sequential()
        inputs = 64
        for stage, (units, outputs) in enumerate(zip(_UNITS, _FILTERS, strict=True)):
            for unit in range(units):
                stride = 2 if stage and not unit else 1
                self.units.append(_Unit(inputs, outputs, stride, matches=unit > 0))
                inputs = outputs
        self.norm, self.head = nn.BatchNorm2d(inputs, _EPSILON), nn.Linear(inputs, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.units(self.stem(images))))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)


def preactivation_resnet152(batch: int = 32, *, image: int = 224, classes: int = 1000) -> Case:
    """A training call on ``batch`` random images of ``image`` pixels."""
    arguments = (image_batch(batch, image, multiple=32), integers(classes, batch))
    return Case(_ResNet(classes), arguments, name=f"preactivation-resnet152-{image}-b{batch}")

"""Residual networks with bottlenecks (He et al. 2016), the stride on the 3x3 convolution as torchvision has it.

The sum of a block and its shortcut and the ReLU behind it work in place, as in torchvision: in-place user code is
part of what the zoo is for.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.case import Case
from ebbtide.zoo.inputs import ImageSize, image_batch, integers

__all__ = ["ResNet", "resnet50", "resnet101", "resnet152", "resnet200", "resnet_case"]

_EXPANSION = 4  # outputs of a bottleneck per inner channel (He et al. 2016, figure 5)


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution, each behind batch norm, added to the shortcut."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = _EXPANSION * channels
        self.conv1, self.norm1 = nn.Conv2d(inputs, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3, self.norm3 = nn.Conv2d(channels, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape ``(batch, inputs, height, width)`` to ``(batch, 4 * channels, height / stride, width / stride)``."""
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.norm3(self.conv3(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A 7x7 stem, four stages of bottlenecks, a global mean and a linear head; the forward returns the loss.

    Args:
        blocks: number of bottlenecks per stage.
        width: channels of the stem and inner channels of the first stage; doubles with each stage.
        classes: number of labels.
    """

    def __init__(self, blocks: tuple[int, ...], *, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.stages = nn.Sequential()
        inputs = width
        for stage, count in enumerate(blocks):
            channels = width << stage
            for block in range(count):
                self.stages.append(Bottleneck(inputs, channels, stride=2 if stage and not block else 1))
                inputs = _EXPANSION * channels
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of ``labels``, shape ``(batch,)``, given ``images``, ``(batch, 3, height, width)``."""
        x = self.pool(self.stages(self.stem(images)))
        return F.cross_entropy(self.head(x.flatten(1)), labels)


def resnet50(batch: int = 4, *, image: ImageSize = 128, width: int = 64, classes: int = 1000) -> Case:
    """A training call of ResNet-50 on ``batch`` random images of ``image`` pixels; the paper's are 224 x 224."""
    return resnet_case("resnet50", (3, 4, 6, 3), batch, image, width, classes)


def resnet101(batch: int = 4, *, image: ImageSize = 128, width: int = 64, classes: int = 1000) -> Case:
    """A training call of ResNet-101 on ``batch`` random images of ``image`` pixels; the paper's are 224 x 224."""
    return resnet_case("resnet101", (3, 4, 23, 3), batch, image, width, classes)


def resnet152(batch: int = 4, *, image: ImageSize = 128, width: int = 64, classes: int = 1000) -> Case:
    """A training call of ResNet-152 on ``batch`` random images of ``image`` pixels; the paper's are 224 x 224."""
    return resnet_case("resnet152", (3, 8, 36, 3), batch, image, width, classes)


def resnet200(batch: int = 4, *, image: ImageSize = 128, width: int = 64, classes: int = 1000) -> Case:
    """A training call of ResNet-200 (He et al. 2016, "Identity Mappings", section 5) with the blocks of the others."""
    return resnet_case("resnet200", (3, 24, 36, 3), batch, image, width, classes)


def resnet_case(name: str, blocks: tuple[int, ...], batch: int, image: ImageSize, width: int, classes: int) -> Case:
    """A training call of a ResNet of these ``blocks`` per stage on ``batch`` random images."""
    images = image_batch(batch, image, multiple=1)
    height, across = images.shape[2:]
    model = ResNet(blocks, width=width, classes=classes)
    return Case(model, (images, integers(classes, batch)), name=f"{name}-w{width}-{height}x{across}-b{batch}")

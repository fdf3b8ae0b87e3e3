"""FCN-8s (Long et al. 2015): VGG-16 made fully convolutional, with scores from three depths summed on the way up.

Two departures: convolutions are padded by what they need (the paper pads the image by 100 pixels and crops), and the
scoring layers start random, not zero, so that the first step already has gradients everywhere. As in the paper the
last upsampling is bilinear and frozen: a parameter that asks for no gradient.
"""

from __future__ import annotations

import torch
from torch import nn

from ebbtide.case import Case
from ebbtide.zoo.inputs import ImageSize, image_batch, integers, pixel_loss
from ebbtide_published.zoo.vgg import VGG16, stage, stage_channels

__all__ = ["FCN8", "fcn8"]


class FCN8(nn.Module):
    """VGG-16's stages, two convolutions for its linear layers, and the way up; the forward returns the loss per pixel.

    Args:
        width: channels of the first stage.
        hidden: channels of the two convolutions that stand for VGG's linear layers.
        dropout: probability behind each of these.
        classes: number of labels of a pixel.
    """

    def __init__(self, *, width: int = 64, hidden: int = 4096, dropout: float = 0.5, classes: int = 21) -> None:
        super().__init__()
        channels = stage_channels(width)
        inputs = (3, *channels[:-1])
        self.stages = nn.ModuleList(
            nn.Sequential(stage(before, here, count), nn.MaxPool2d(2))
            for before, here, count in zip(inputs, channels, VGG16, strict=True)
        )
        self.hidden = nn.Sequential(
            nn.Conv2d(channels[-1], hidden, 7, padding=3),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Conv2d(hidden, hidden, 1),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
        )
        self.score32 = nn.Conv2d(hidden, classes, 1)
        self.score16 = nn.Conv2d(channels[3], classes, 1)
        self.score8 = nn.Conv2d(channels[2], classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        self.up32, self.up16 = _bilinear(classes, 2), _bilinear(classes, 2)
        self.up8 = _bilinear(classes, 8).requires_grad_(False)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of all pixels.

        Args:
            images: shape ``(batch, 3, height, width)``.
            labels: int64, shape ``(batch, height, width)``.
        """
        planes: list[torch.Tensor] = []
        x = images
        for layers in self.stages:
            x = layers(x)
            planes.append(x)
        scores = self.up32(self.score32(self.hidden(planes[4]))) + self.score16(planes[3])
        scores = self.up16(scores) + self.score8(planes[2])
        return pixel_loss(self.up8(scores), labels)


def _bilinear(channels: int, factor: int) -> nn.ConvTranspose2d:
    """A transposed convolution that starts as bilinear upsampling by ``factor``, an even number, per channel."""
    layer = nn.ConvTranspose2d(channels, channels, 2 * factor, stride=factor, padding=factor // 2, bias=False)
    ramp = 1 - (torch.arange(2 * factor) - (factor - 0.5)).abs() / factor
    with torch.no_grad():
        layer.weight.copy_(torch.eye(channels)[:, :, None, None] * torch.outer(ramp, ramp))
    return layer


def fcn8(batch: int = 4, *, image: ImageSize = 128, width: int = 64, hidden: int = 1024, classes: int = 21) -> Case:
    """A training call of FCN-8s on ``batch`` random images of ``image`` pixels.

    ``hidden`` is 4096 in the paper, 1024 here, so that two cores train it; Checkmate's images are 416 x 608.
    """
    images = image_batch(batch, image, multiple=32)
    height, across = images.shape[2:]
    model = FCN8(width=width, hidden=hidden, classes=classes)
    labels = integers(classes, batch, height, across)
    return Case(model, (images, labels), name=f"fcn8-w{width}-{height}x{across}-b{batch}")

"""SegNet (Badrinarayanan et al. 2017): VGG-16's convolutions and their mirror image.

The decoder has no planes from the encoder, only the places where each max-pool found its maximum: it unpools there.
"""

from __future__ import annotations

import torch
from torch import nn

from ebbtide.case import Case
from ebbtide.zoo.inputs import ImageSize, image_batch, integers, pixel_loss
from ebbtide_published.zoo.vgg import VGG16, stage, stage_channels

__all__ = ["SegNet", "segnet"]


class SegNet(nn.Module):
    """Five stages with max-pools, five with unpoolings, a 3x3 head; the forward returns the loss per pixel.

    Args:
        width: channels of the first stage.
        classes: number of labels of a pixel.
    """

    def __init__(self, *, width: int = 64, classes: int = 12) -> None:
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        channels = stage_channels(width)
        inputs = (3, *channels[:-1])
        self.encoder = nn.ModuleList(
            stage(before, here, count, norm=True) for before, here, count in zip(inputs, channels, VGG16, strict=True)
        )
        self.decoder = nn.ModuleList()
        for below, here, count in reversed(list(zip(inputs[1:], channels[1:], VGG16[1:], strict=True))):
            layers = stage(here, here, count - 1, norm=True)
            self.decoder.append(layers.extend(stage(here, below, 1, norm=True)))
        self.decoder.append(stage(width, width, 1, norm=True).append(nn.Conv2d(width, classes, 3, padding=1)))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of all pixels.

        Args:
            images: shape ``(batch, 3, height, width)``.
            labels: int64, shape ``(batch, height, width)``.
        """
        places: list[torch.Tensor] = []
        x = images
        for layers in self.encoder:
            x, indices = self.pool(layers(x))
            places.append(indices)
        for layers in self.decoder:
            x = layers(self.unpool(x, places.pop()))
        return pixel_loss(x, labels)


def segnet(batch: int = 2, *, image: ImageSize = 128, width: int = 64, classes: int = 12) -> Case:
    """A training call of SegNet on ``batch`` random images of ``image`` pixels; the paper's are 360 x 480.

    Height and width are multiples of 32 here, so 352 x 480 is nearest; Checkmate's are 416 x 608.
    """
    images = image_batch(batch, image, multiple=32)
    height, across = images.shape[2:]
    model = SegNet(width=width, classes=classes)
    labels = integers(classes, batch, height, across)
    return Case(model, (images, labels), name=f"segnet-w{width}-{height}x{across}-b{batch}")

"""U-Net (Ronneberger et al. 2015): a path down, a path up, and at each level the one's planes go to the other.

The variant with batch norm behind every 3x3 convolution, and with padded convolutions, so that the scores are as
large as the image; the paper has neither. Its dropout at the end of the path down is kept.
"""

from __future__ import annotations

import torch
from torch import nn

from ebbtide.case import Case
from ebbtide.zoo.inputs import ImageSize, image_batch, integers, pixel_loss

__all__ = ["UNet", "unet"]


def _double(inputs: int, outputs: int) -> nn.Sequential:
    """Twice a 3x3 convolution, batch norm and a ReLU in place."""
    layers = nn.Sequential()
    for channels in (inputs, outputs):
        layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
        layers.extend([nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)])
    return layers


class UNet(nn.Module):
    """``levels`` times down and up again; the forward returns the loss per pixel.

    Args:
        width: channels of the first level; doubles with each level.
        levels: number of halvings.
        dropout: probability at the lowest level.
        classes: number of labels of a pixel.
    """

    def __init__(self, *, width: int = 64, levels: int = 4, dropout: float = 0.5, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.pool, self.dropout = nn.MaxPool2d(2), nn.Dropout(dropout)
        self.down, self.up, self.merge = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        inputs = 3
        for channels in widths:
            self.down.append(_double(inputs, channels))
            inputs = channels
        for channels in reversed(widths[:-1]):
            self.up.append(nn.ConvTranspose2d(2 * channels, channels, 2, stride=2))
            self.merge.append(_double(2 * channels, channels))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of all pixels.

        Args:
            images: shape ``(batch, 3, height, width)``.
            labels: int64, shape ``(batch, height, width)``.
        """
        kept: list[torch.Tensor] = []
        x = images
        for level, down in enumerate(self.down):
            x = down(self.pool(x) if level else x)
            kept.append(x)
        x = self.dropout(kept.pop())
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([kept.pop(), up(x)], 1))
        return pixel_loss(self.head(x), labels)


def unet(
    batch: int = 2, *, image: ImageSize = 128, width: int = 64, levels: int = 4, dropout: float = 0.5, classes: int = 2
) -> Case:
    """A training call of U-Net on ``batch`` random images of ``image`` pixels; Checkmate's are 416 x 608."""
    images = image_batch(batch, image, multiple=1 << levels)
    height, across = images.shape[2:]
    model = UNet(width=width, levels=levels, dropout=dropout, classes=classes)
    labels = integers(classes, batch, height, across)
    return Case(model, (images, labels), name=f"unet-w{width}-{height}x{across}-b{batch}")

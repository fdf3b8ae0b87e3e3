"""Inception v3 (Szegedy et al. 2015, "Rethinking the Inception Architecture", section 6), as torchvision has it.

Every convolution is followed by batch norm and a ReLU; an auxiliary classifier reads the 17x17 grid, and its loss is
added with a weight of 0.4 (torchvision's reference training; Szegedy et al. 2014, section 5, have 0.3). On images below
299 pixels that grid is smaller, and so is, where it has to be, the kernel of the auxiliary classifier, as in
TensorFlow's slim.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.case import Case
from ebbtide.errors import UsageError
from ebbtide.zoo.inputs import ImageSize, images_of, integers

__all__ = ["InceptionV3", "inception_v3"]

_Size = int | tuple[int, int]
_LEAST = 107  # pixels: below, nothing is left of the auxiliary classifier's 5x5 mean
_KERNEL = 5  # of the auxiliary classifier's convolution; for images below 299 pixels what is left
_AUXILIARY = 0.4


class _Convolution(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: _Size, *, stride: int = 1, padding: _Size = 0) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(outputs, eps=0.001),
            nn.ReLU(inplace=True),
        )


class _Branches(nn.Module):
    """Branches that read the same grid, side by side in its channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _pooled(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _Convolution(inputs, outputs, 1))


def _grid_35(inputs: int, pooled: int, width: int) -> nn.Module:
    """Figure 5: 5x5 as two 3x3."""
    conv = _Convolution
    return _Branches(
        conv(inputs, width, 1),
        nn.Sequential(conv(inputs, 3 * width // 4, 1), conv(3 * width // 4, width, 5, padding=2)),
        nn.Sequential(
            conv(inputs, width, 1),
            conv(width, 3 * width // 2, 3, padding=1),
            conv(3 * width // 2, 3 * width // 2, 3, padding=1),
        ),
        _pooled(inputs, pooled),
    )


def _to_17(inputs: int, width: int) -> nn.Module:
    """Figure 10."""
    conv = _Convolution
    return _Branches(
        conv(inputs, 6 * width, 3, stride=2),
        nn.Sequential(
            conv(inputs, width, 1),
            conv(width, 3 * width // 2, 3, padding=1),
            conv(3 * width // 2, 3 * width // 2, 3, stride=2),
        ),
        nn.MaxPool2d(3, stride=2),
    )


def _grid_17(inputs: int, inner: int, outputs: int) -> nn.Module:
    """Figure 6: 7x7 as 1x7 and 7x1."""
    conv = _Convolution

    def across(channels: int, to: int) -> nn.Module:
        return conv(channels, to, (1, 7), padding=(0, 3))

    def down(channels: int, to: int) -> nn.Module:
        return conv(channels, to, (7, 1), padding=(3, 0))

    return _Branches(
        conv(inputs, outputs, 1),
        nn.Sequential(conv(inputs, inner, 1), across(inner, inner), down(inner, outputs)),
        nn.Sequential(
            conv(inputs, inner, 1),
            down(inner, inner),
            across(inner, inner),
            down(inner, inner),
            across(inner, outputs),
        ),
        _pooled(inputs, outputs),
    )


def _to_8(inputs: int, width: int) -> nn.Module:
    conv = _Convolution
    return _Branches(
        nn.Sequential(conv(inputs, 3 * width, 1), conv(3 * width, 5 * width, 3, stride=2)),
        nn.Sequential(
            conv(inputs, 3 * width, 1),
            conv(3 * width, 3 * width, (1, 7), padding=(0, 3)),
            conv(3 * width, 3 * width, (7, 1), padding=(3, 0)),
            conv(3 * width, 3 * width, 3, stride=2),
        ),
        nn.MaxPool2d(3, stride=2),
    )


def _grid_8(inputs: int, width: int) -> nn.Module:
    """Figure 7: wider at the end."""
    conv = _Convolution

    def both(channels: int) -> nn.Module:
        return _Branches(
            conv(channels, 6 * width, (1, 3), padding=(0, 1)), conv(channels, 6 * width, (3, 1), padding=(1, 0))
        )

    return _Branches(
        conv(inputs, 5 * width, 1),
        nn.Sequential(conv(inputs, 6 * width, 1), both(6 * width)),
        nn.Sequential(conv(inputs, 7 * width, 1), conv(7 * width, 6 * width, 3, padding=1), both(6 * width)),
        _pooled(inputs, 3 * width),
    )


class InceptionV3(nn.Module):
    """A stem, three kinds of grids, a global mean, a head and an auxiliary one; the forward returns the loss.

    Args:
        width: channels of the narrowest branch of the first grid, a multiple of 8; the paper's is 64.
        classes: number of labels.
        kernel: height and width of the auxiliary classifier's convolution.
    """

    def __init__(self, *, width: int = 64, classes: int = 1000, kernel: tuple[int, int] = (_KERNEL, _KERNEL)) -> None:
        super().__init__()
        conv, half = _Convolution, width // 2
        self.stem = nn.Sequential(
            conv(3, half, 3, stride=2),
            conv(half, half, 3),
            conv(half, width, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            conv(width, 5 * width // 4, 1),
            conv(5 * width // 4, 3 * width, 3),
            nn.MaxPool2d(3, stride=2),
        )
        first, grid, inner = 4 * width, 12 * width, 2 * width
        self.grids = nn.Sequential(
            _grid_35(3 * width, half, width),
            _grid_35(first, width, width),
            _grid_35(first + half, width, width),
            _to_17(first + half, width),
            _grid_17(grid, inner, 3 * width),
            _grid_17(grid, 5 * width // 2, 3 * width),
            _grid_17(grid, 5 * width // 2, 3 * width),
            _grid_17(grid, 3 * width, 3 * width),
        )
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(5, stride=3),
            conv(grid, inner, 1),
            conv(inner, 12 * width, kernel),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12 * width, classes),
        )
        self.last = nn.Sequential(_to_8(grid, width), _grid_8(20 * width, width), _grid_8(32 * width, width))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(32 * width, classes)
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of ``labels``, shape ``(batch,)``, given ``images``, ``(batch, 3, height, width)``."""
        x = self.grids(self.stem(images))
        loss = F.cross_entropy(self.head(self.last(x)), labels)
        return loss + _AUXILIARY * F.cross_entropy(self.auxiliary(x), labels)


def _left(pixels: int) -> int:
    """What the stem, two pools and the auxiliary classifier's mean leave of so many pixels."""
    pixels = (pixels - 1) // 2 - 2
    pixels = (pixels - 1) // 2 - 2
    pixels = ((pixels - 1) // 2 - 1) // 2
    return (pixels - 2) // 3


def inception_v3(batch: int = 4, *, image: ImageSize = 299, width: int = 64, classes: int = 1000) -> Case:
    """A training call of Inception v3 on ``batch`` random images of ``image`` pixels.

    Raises:
        UsageError: if the height or the width is below 107 pixels: the auxiliary classifier needs them.
    """
    height, across = (image, image) if isinstance(image, int) else image
    if min(height, across) < _LEAST:
        raise UsageError(f"image={image} does not fit: height and width have to be {_LEAST} pixels at the least")
    images = images_of(batch, height, across)
    kernel = min(_KERNEL, _left(height)), min(_KERNEL, _left(across))
    model = InceptionV3(width=width, classes=classes, kernel=kernel)
    return Case(model, (images, integers(classes, batch)), name=f"inception_v3-w{width}-{height}x{across}-b{batch}")

"""Random inputs for the zoo: drawn from a generator of their own, so that only parameters draw from the global one.

The generator is the CPU's whatever the default device, so a case holds the same values everywhere; shapes come out
as they would under ``FakeTensorMode`` and on ``meta``.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ebbtide.errors import UsageError

__all__ = ["ImageSize", "image_batch", "images_of", "integers", "noise", "pixel_loss"]

ImageSize = int | tuple[int, int]
"""Height and width, pixels; one number stands for both."""


def image_batch(batch: int, image: ImageSize, *, multiple: int) -> torch.Tensor:
    """Standard normal images, float32, shape ``(batch, 3, height, width)``.

    Args:
        batch: number of images.
        image: height and width, pixels.
        multiple: what the model halves away: height and width are multiples of it.

    Raises:
        UsageError: if the height or the width is not a positive multiple of ``multiple``.
    """
    height, width = (image, image) if isinstance(image, int) else image
    if height < 1 or width < 1 or height % multiple or width % multiple:
        raise UsageError(f"image={image} does not fit: height and width have to be multiples of {multiple} pixels")
    return images_of(batch, height, width)


def images_of(batch: int, height: int, width: int) -> torch.Tensor:
    """Standard normal images of any size, float32, shape ``(batch, 3, height, width)``."""
    return noise(batch, 3, height, width, seed=0)


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    """Standard normal numbers, float32; each ``seed`` draws others."""
    return _placed(torch.randn(*shape, generator=_generator(seed), device="cpu"))


def integers(limit: int, *shape: int, seed: int = 1) -> torch.Tensor:
    """Labels or tokens: uniform int64 in ``[0, limit)`` of the shape given; each ``seed`` draws others."""
    return _placed(torch.randint(limit, shape, generator=_generator(seed), device="cpu"))


def pixel_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of every pixel.

    Pixels become rows first: the loss of rows is deterministic on CUDA, that of planes (``nll_loss2d``) is not.

    Args:
        scores: shape ``(batch, classes, height, width)``.
        labels: int64 classes, shape ``(batch, height, width)``.
    """
    return F.cross_entropy(scores.permute(0, 2, 3, 1).flatten(0, 2), labels.flatten())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    """On the default device, as the parameters are."""
    return tensor.to(torch.get_default_device())

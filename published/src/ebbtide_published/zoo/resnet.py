"""The deepest residual networks that swapping papers train: blocks of the library's ResNet, many more of them."""

from __future__ import annotations

from ebbtide.case import Case
from ebbtide.zoo.inputs import ImageSize
from ebbtide.zoo.resnet import resnet_case

__all__ = ["resnet1001", "resnet2000"]


def resnet1001(
    batch: int = 1,
    *,
    image: ImageSize = 128,
    width: int = 64,
    classes: int = 1000,
    blocks: tuple[int, ...] = (6, 32, 289, 6),
) -> Case:
    """A training call of a ResNet of 1001 layers; how blocks are spread is that of SuperNeurons (PPoPP 2018, 4.1)."""
    return resnet_case("resnet1001", blocks, batch, image, width, classes)


def resnet2000(
    batch: int = 1,
    *,
    image: ImageSize = 128,
    width: int = 64,
    classes: int = 1000,
    blocks: tuple[int, ...] = (6, 32, 622, 6),
) -> Case:
    """A training call of a ResNet of 2000 layers, spread as in :func:`resnet1001`."""
    return resnet_case("resnet2000", blocks, batch, image, width, classes)

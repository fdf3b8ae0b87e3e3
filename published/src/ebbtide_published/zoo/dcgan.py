"""A generator of images and a discriminator that learn from each other (Radford et al. 2015, section 3, figure 1).

One call trains both players, or one of them, as its argument ``player`` says:
1. the *discriminator* learns that real images are real and that generated ones, detached, are not;
2. the *generator* learns to make images that the discriminator takes for real: its loss reads the discriminator's
   weights detached, so that they take no gradient of it.

The gradients of ``both`` are those of the usual two steps, had both been made before either optimizer's.

The paper's images are of 64 pixels. For larger ones either player has another layer per doubling, with twice the
channels of the widest: a layer's channels still halve where its pixels double.
"""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.case import Case
from ebbtide.errors import UsageError
from ebbtide.zoo.inputs import images_of, noise

__all__ = ["DCGAN", "Player", "dcgan"]

Player = Literal["both", "discriminator", "generator"]
_SLOPE = 0.2  # of the leaky ReLU, and below the deviation of initial weights (section 4)
_DEVIATION = 0.02
_SMALLEST = 4  # pixels: of the generator's first layer and the discriminator's last
_LEAST = 64


class Generator(nn.Sequential):
    """Noise of shape ``(batch, noise, 1, 1)`` to images of ``(batch, 3, image, image)`` in [-1, 1]."""

    def __init__(self, noise: int, width: int, image: int) -> None:
        channels = _channels(width, image)[::-1]
        layers: list[nn.Module] = [nn.ConvTranspose2d(noise, channels[0], 4, bias=False)]
        for inputs, outputs in zip(channels, [*channels[1:], 3], strict=True):
            layers += [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)]
            layers.append(nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1, bias=False))
        super().__init__(*layers, nn.Tanh())


def _channels(width: int, image: int) -> list[int]:
    """Channels of each layer but the last, from ``width`` on: as many as halve ``image`` pixels down to 4."""
    return [width << layer for layer in range((image // _SMALLEST).bit_length() - 1)]


class _Halving(nn.Module):
    """A convolution of stride 2, a norm if ``normed``, and a leaky ReLU; weights may be read without a gradient."""

    def __init__(self, inputs: int, outputs: int, *, normed: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 4, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs) if normed else None

    def forward(self, x: torch.Tensor, frozen: bool) -> torch.Tensor:
        x = F.conv2d(x, _weight(self.convolution.weight, frozen), stride=2, padding=1)
        if (norm := self.norm) is not None:
            scale, shift = _weight(norm.weight, frozen), _weight(norm.bias, frozen)
            x = F.batch_norm(x, norm.running_mean, norm.running_var, scale, shift, self.training)
        return F.leaky_relu(x, _SLOPE)


def _weight(parameter: torch.Tensor, frozen: bool) -> torch.Tensor:
    return parameter.detach() if frozen else parameter


class Discriminator(nn.Module):
    """Images of shape ``(batch, 3, image, image)`` to a score each, ``(batch,)``; above 0 is real."""

    def __init__(self, width: int, image: int) -> None:
        super().__init__()
        channels = [3, *_channels(width, image)]
        pairs = list(itertools.pairwise(channels))
        self.layers = nn.ModuleList(_Halving(*pair, normed=bool(place)) for place, pair in enumerate(pairs))
        self.score = nn.Conv2d(channels[-1], 1, 4, bias=False)

    def forward(self, images: torch.Tensor, frozen: bool = False) -> torch.Tensor:
        """The scores; ``frozen`` if the weights are to take no gradient."""
        x = images
        for layer in self.layers:
            x = layer(x, frozen)
        return F.conv2d(x, _weight(self.score.weight, frozen)).flatten()


class DCGAN(nn.Module):
    """Both players; the forward returns the loss of those that learn.

    Args:
        noise: numbers that an image is made of; the paper's are 100.
        width: channels of the last layer but one of the generator and of the first of the discriminator; the paper's
            generator has 128.
        image: height and width of an image, pixels; a power of two from 64 on.
    """

    def __init__(self, *, noise: int = 100, width: int = 128, image: int = _LEAST) -> None:
        super().__init__()
        self.generator, self.discriminator = Generator(noise, width, image), Discriminator(width, image)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.normal_(module.weight, std=_DEVIATION)

    def forward(self, images: torch.Tensor, noise: torch.Tensor, player: Player = "both") -> torch.Tensor:
        """The sum of the losses of ``player``.

        Args:
            images: shape ``(batch, 3, image, image)``, in [-1, 1].
            noise: shape ``(batch, noise, 1, 1)``.
            player: who learns.
        """
        made = self.generator(noise) if player != "discriminator" else self._made_only(noise)
        loss = torch.zeros((), device=images.device)
        if player != "generator":
            real, fake = self.discriminator(images), self.discriminator(made.detach())
            loss = loss + F.softplus(-real).mean() + F.softplus(fake).mean()
        if player != "discriminator":
            loss = loss + F.softplus(-self.discriminator(made, frozen=True)).mean()
        return loss

    def _made_only(self, noise: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.generator(noise)


def dcgan(
    batch: int = 16, *, noise_size: int = 100, width: int = 128, image: int = _LEAST, player: Player = "both"
) -> Case:
    """A training call of :class:`DCGAN` on ``batch`` random images of ``image`` x ``image`` and as much noise.

    Raises:
        UsageError: if ``image`` is not a power of two from 64 on.
    """
    if image < _LEAST or image & (image - 1):
        raise UsageError(f"image={image} does not fit: it has to be a power of two, {_LEAST} pixels at the least")
    model = DCGAN(noise=noise_size, width=width, image=image)
    arguments = (images_of(batch, image, image).tanh(), noise(batch, noise_size, 1, 1))
    name = f"dcgan-w{width}-{image}x{image}-b{batch}" + ("" if player == "both" else f"-{player}")
    return Case(model, arguments, {} if player == "both" else {"player": player}, name=name)

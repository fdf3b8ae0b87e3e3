"""Inputs with labels for the models of Hugging Face, drawn from torch's generator; sizes for a fraction of a second."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "CLASSES",
    "LENGTH",
    "VOCABULARY",
    "answers",
    "brief",
    "captions",
    "classified",
    "images",
    "masked",
    "mel_words",
    "paired",
    "prefixed",
    "segmented",
    "sounds",
    "spectrograms",
    "waves",
    "words",
]

VOCABULARY, LENGTH, BATCH = 1024, 128, 16
CLASSES, SIDE, IMAGES = 10, 64, 32
_FIRST = 5
"""Lower ids are special in some library or other."""


def _tokens(*shape: int, most: int = VOCABULARY) -> Tensor:
    return torch.randint(_FIRST, most, shape)


def words() -> dict[str, Any]:
    """Text to be modelled from left to right, or written again by a decoder."""
    tokens = _tokens(BATCH, LENGTH)
    return {"input_ids": tokens, "labels": tokens}


def brief() -> dict[str, Any]:
    """A quarter of the length, for what loops over it in Python."""
    tokens = _tokens(BATCH, LENGTH // 4)
    return {"input_ids": tokens, "labels": tokens}


def masked() -> dict[str, Any]:
    """Sentences of two lengths, padded; labels at a seventh of the places."""
    tokens = _tokens(BATCH, LENGTH)
    mask = torch.ones_like(tokens)
    mask[: BATCH // 2, 3 * LENGTH // 4 :] = 0
    chosen = (torch.rand(tokens.shape) < 0.15) & (mask == 1)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(~chosen, -100)}


def answers() -> dict[str, Any]:
    starts = torch.randint(0, LENGTH - 8, (BATCH,))
    return {"input_ids": _tokens(BATCH, LENGTH), "start_positions": starts, "end_positions": starts + 4}


def classified() -> dict[str, Any]:
    return {"input_ids": _tokens(BATCH, LENGTH), "labels": torch.arange(BATCH) % 2}


def images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(IMAGES, 3, SIDE, SIDE), "labels": torch.arange(IMAGES) % CLASSES}


def segmented() -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE), "labels": torch.randint(0, CLASSES, (BATCH, SIDE, SIDE))}


def paired() -> dict[str, Any]:
    return {
        "input_ids": _tokens(IMAGES, 32),
        "pixel_values": torch.randn(IMAGES, 3, SIDE, SIDE),
        "return_loss": True,
    }


def captions() -> dict[str, Any]:
    tokens = _tokens(BATCH, 64)
    return {"input_ids": tokens, "pixel_values": torch.randn(BATCH, 3, SIDE, SIDE), "labels": tokens}


def prefixed() -> dict[str, Any]:
    """Text that begins with the places of an image's 64 patches, id 3."""
    tokens = _tokens(BATCH, LENGTH)
    tokens[:, :64] = 3
    return {
        "input_ids": tokens,
        "pixel_values": torch.randn(BATCH, 3, SIDE, SIDE),
        "labels": tokens.masked_fill(tokens == 3, -100),
    }


def waves() -> dict[str, Any]:
    """Sound to be written down in letters."""
    return {"input_values": torch.randn(8, 16_000), "labels": _tokens(8, 12, most=30)}


def sounds() -> dict[str, Any]:
    return {"input_values": torch.randn(8, 16_000), "labels": torch.arange(8) % CLASSES}


def spectrograms() -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 128, 64), "labels": torch.arange(BATCH) % CLASSES}


def mel_words() -> dict[str, Any]:
    """Spectrograms, channels first, to be written down in words."""
    return {"input_features": torch.randn(BATCH, 80, 256), "labels": _tokens(BATCH, 64)}

"""Deep Speech 2 (Amodei et al. 2015, sections 3.1 to 3.5): convolutions over a spectrogram, recurrent layers, CTC.

Two convolutions over frequency and time, a stack of bidirectional recurrent layers whose directions are added, each
behind a batch norm over all places of the batch (section 3.2), a linear layer, and the loss over all alignments.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.case import Case
from ebbtide.zoo.inputs import integers, noise

__all__ = ["DeepSpeech2", "deepspeech2"]

FREQUENCIES = 161  # of windows of 20 ms at 16 kHz (section 3: a spectrogram)
CHARACTERS = 29  # letters, space, apostrophe and the blank (section 3)
_CHANNELS = 32
_CEILING = 20.0  # of the clipped ReLU (section 3.1)


class DeepSpeech2(nn.Module):
    """The network; the forward returns the loss.

    Args:
        layers: bidirectional recurrent layers.
        width: of each direction.
    """

    def __init__(self, *, layers: int = 5, width: int = 800) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, _CHANNELS, (41, 11), stride=(2, 2), padding=(20, 5), bias=False)
        self.second = nn.Conv2d(_CHANNELS, _CHANNELS, (21, 11), stride=(2, 1), padding=(10, 5), bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(_CHANNELS), nn.BatchNorm2d(_CHANNELS)
        sizes = [_CHANNELS * -(-FREQUENCIES // 4), *[width] * (layers - 1)]
        self.layers = nn.ModuleList(nn.GRU(size, width, bidirectional=True) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(size) for size in sizes)
        self.head_norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, CHARACTERS, bias=False)

    def forward(self, spectrograms: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean CTC loss of ``labels``, ``(batch, characters)``, given ``spectrograms``, ``(batch, 161, frames)``."""
        x = F.hardtanh(self.first_norm(self.first(spectrograms.unsqueeze(1))), 0.0, _CEILING)
        x = F.hardtanh(self.second_norm(self.second(x)), 0.0, _CEILING)
        x = x.flatten(1, 2).permute(2, 0, 1).contiguous()  # (frames / 2, batch, features)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x, _ = layer(_over_places(norm, x))
            forward, backward = x.chunk(2, -1)
            x = forward + backward
        scores = self.head(_over_places(self.head_norm, x)).log_softmax(-1)
        frames, batch = scores.shape[:2]
        return F.ctc_loss(scores, labels, (frames,) * batch, (labels.shape[1],) * batch)


def _over_places(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A norm over frames and batch together."""
    return norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def deepspeech2(batch: int = 8, *, frames: int = 200, layers: int = 5, width: int = 800) -> Case:
    """A training call of :class:`DeepSpeech2` on ``batch`` random recordings of ``frames`` steps of 10 ms."""
    labels = 1 + integers(CHARACTERS - 1, batch, max(1, frames // 8))  # 0 is the blank
    arguments = (noise(batch, FREQUENCIES, frames), labels)
    name = f"deepspeech2-{layers}L-d{width}-t{frames}-b{batch}"
    return Case(DeepSpeech2(layers=layers, width=width), arguments, name=name)

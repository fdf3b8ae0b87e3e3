"""Every model, the library's and the papers', at a size for tests: full depth, some tenths of a second on one core."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ebbtide.case import Case
from ebbtide.zoo.small import SMALL as OF_THE_LIBRARY
from ebbtide_published.zoo.dcgan import dcgan
from ebbtide_published.zoo.deepspeech import deepspeech2
from ebbtide_published.zoo.densenet import densenet121
from ebbtide_published.zoo.fcn import fcn8
from ebbtide_published.zoo.inception import inception_v3
from ebbtide_published.zoo.lstm_lm import lstm_lm
from ebbtide_published.zoo.mobilenet import mobilenet
from ebbtide_published.zoo.nmt import nmt, nmt_luong
from ebbtide_published.zoo.resnet import resnet1001, resnet2000
from ebbtide_published.zoo.segnet import segnet
from ebbtide_published.zoo.transformer import TransformerConfig, transformer_base
from ebbtide_published.zoo.vgg import vgg16, vgg19

__all__ = ["PAPERS", "SMALL"]

_TRANSFORMER = TransformerConfig(vocabulary=512, layers=3, width=128, hidden=256, heads=4)

PAPERS: dict[str, Callable[[], Case]] = {
    "dcgan": partial(dcgan, 4, noise_size=32, width=16),
    "deepspeech2": partial(deepspeech2, 4, frames=64, layers=3, width=96),
    "densenet121": partial(densenet121, 4, image=64, growth=12, classes=10),
    "fcn8": partial(fcn8, 2, image=128, width=16, hidden=64),
    "inception_v3": partial(inception_v3, 2, width=8, classes=10),
    "lstm_lm": partial(lstm_lm, 32, vocabulary=1000, length=20, width=256),
    "mobilenet": partial(mobilenet, 8, image=64, width=24, classes=10),
    "nmt": partial(nmt, 32, vocabulary=500, length=16, width=128),
    "nmt_luong": partial(nmt_luong, 32, vocabulary=500, length=20, width=160),
    # The deepest two are this model with more blocks: some twenty thousand ops.
    "resnet1001": partial(resnet1001, 2, image=32, width=8, classes=10, blocks=(1, 2, 8, 1)),
    "resnet2000": partial(resnet2000, 2, image=32, width=8, classes=10, blocks=(1, 2, 16, 1)),
    "segnet": partial(segnet, 2, image=96, width=16),
    "transformer_base": partial(transformer_base, 8, length=64, config=_TRANSFORMER),
    "vgg16": partial(vgg16, 4, image=64, width=24, hidden=256, classes=10),
    "vgg19": partial(vgg19, 4, image=64, width=24, hidden=256, classes=10),
}
SMALL = dict(sorted({**OF_THE_LIBRARY, **PAPERS}.items()))

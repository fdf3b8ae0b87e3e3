"""Every model of the zoo at a size for tests: full depth, a step of some tenths of a second on one core.

Peaks above the step's start are ten MiB and more, so that what a plan saves is not lost in rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ebbtide.case import Case
from ebbtide.zoo.dcgan import dcgan
from ebbtide.zoo.deepspeech import deepspeech2
from ebbtide.zoo.densenet import densenet121
from ebbtide.zoo.fcn import fcn8
from ebbtide.zoo.gpt import GPTConfig, gpt, gpt2_small
from ebbtide.zoo.hf import hf_bert, hf_gpt2, hf_llama, hf_t5
from ebbtide.zoo.inception import inception_v3
from ebbtide.zoo.llama import LlamaSizes, llama, llama_small
from ebbtide.zoo.lstm_lm import lstm_lm
from ebbtide.zoo.mlp_chain import mlp_chain
from ebbtide.zoo.mobilenet import mobilenet
from ebbtide.zoo.nmt import nmt, nmt_luong
from ebbtide.zoo.resnet import resnet50, resnet101, resnet152, resnet200, resnet1001, resnet2000
from ebbtide.zoo.segnet import segnet
from ebbtide.zoo.transformer import TransformerConfig, transformer_base
from ebbtide.zoo.unet import unet
from ebbtide.zoo.vgg import vgg16, vgg19

__all__ = ["SMALL"]

_LLAMA = LlamaSizes(vocabulary=512, layers=4, width=128, hidden=448, heads=4, key_heads=2)
_GPT = GPTConfig(vocabulary=512, length=128, layers=6, width=128, heads=4, dropout=0.1)
_TRANSFORMER = TransformerConfig(vocabulary=512, layers=3, width=128, hidden=256, heads=4)

SMALL: dict[str, Callable[[], Case]] = {
    "dcgan": partial(dcgan, 4, noise_size=32, width=16),
    "deepspeech2": partial(deepspeech2, 4, frames=64, layers=3, width=96),
    "densenet121": partial(densenet121, 4, image=64, growth=12, classes=10),
    "fcn8": partial(fcn8, 2, image=128, width=16, hidden=64),
    "gpt": partial(gpt, 4, _GPT),
    "gpt2_small": partial(gpt2_small, 4, _GPT),
    "hf_bert": partial(hf_bert, 4, vocabulary=512, length=64, layers=6, width=128, heads=4),
    "hf_gpt2": partial(hf_gpt2, 4, vocabulary=512, length=64, layers=6, width=128, heads=4),
    "hf_llama": partial(hf_llama, 4, vocabulary=512, length=64, layers=6, width=128, heads=4),
    "hf_t5": partial(hf_t5, 4, vocabulary=512, length=48, layers=4, width=128, heads=4),
    "inception_v3": partial(inception_v3, 2, width=8, classes=10),
    "llama": partial(llama, 4, length=128, sizes=_LLAMA),
    # The presets are this model at other sizes: one long sequence, more heads to a key, adapters.
    "llama_8b": partial(llama, 1, length=512, sizes=_LLAMA),
    "llama_70b": partial(llama, 1, length=512, sizes=replace(_LLAMA, heads=8)),
    "llama_70b_lora": partial(llama, 1, length=512, sizes=replace(_LLAMA, heads=8, rank=4)),
    "llama_small": partial(llama_small, 4, length=128, sizes=_LLAMA),
    "lstm_lm": partial(lstm_lm, 32, vocabulary=1000, length=20, width=256),
    "mlp_chain": partial(mlp_chain, 1024, layers=48, width=64, dropout=0.1),
    "mobilenet": partial(mobilenet, 8, image=64, width=24, classes=10),
    "nmt": partial(nmt, 32, vocabulary=500, length=16, width=128),
    "nmt_luong": partial(nmt_luong, 32, vocabulary=500, length=20, width=160),
    "resnet50": partial(resnet50, 4, image=64, width=24, classes=10),
    "resnet101": partial(resnet101, 4, image=64, width=16, classes=10),
    "resnet152": partial(resnet152, 2, image=32, width=4, classes=10),
    "resnet200": partial(resnet200, 2, image=32, width=4, classes=10),
    # The deepest two are this model with more blocks: some twenty thousand ops.
    "resnet1001": partial(resnet1001, 2, image=32, width=8, classes=10, blocks=(1, 2, 8, 1)),
    "resnet2000": partial(resnet2000, 2, image=32, width=8, classes=10, blocks=(1, 2, 16, 1)),
    "segnet": partial(segnet, 2, image=96, width=16),
    "transformer_base": partial(transformer_base, 8, length=64, config=_TRANSFORMER),
    "unet": partial(unet, 2, image=96, width=16),
    "vgg16": partial(vgg16, 4, image=64, width=24, hidden=256, classes=10),
    "vgg19": partial(vgg19, 4, image=64, width=24, hidden=256, classes=10),
}

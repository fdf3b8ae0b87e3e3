"""Every model of the zoo at a size for tests: full depth, a step of some tenths of a second on one core.

Peaks above the step's start are ten MiB and more, so that what a plan saves is not lost in rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ebbtide.case import Case
from ebbtide.zoo.gpt import GPTConfig, gpt, gpt2_small
from ebbtide.zoo.hf import hf_bert, hf_gpt2, hf_llama, hf_t5
from ebbtide.zoo.llama import LlamaSizes, llama, llama_small
from ebbtide.zoo.mlp_chain import mlp_chain
from ebbtide.zoo.resnet import resnet50, resnet101, resnet152, resnet200
from ebbtide.zoo.unet import unet

__all__ = ["SMALL"]

_LLAMA = LlamaSizes(vocabulary=512, layers=4, width=128, hidden=448, heads=4, key_heads=2)
_GPT = GPTConfig(vocabulary=512, length=128, layers=6, width=128, heads=4, dropout=0.1)

SMALL: dict[str, Callable[[], Case]] = {
    "gpt": partial(gpt, 4, _GPT),
    "gpt2_small": partial(gpt2_small, 4, _GPT),
    "hf_bert": partial(hf_bert, 4, vocabulary=512, length=64, layers=6, width=128, heads=4),
    "hf_gpt2": partial(hf_gpt2, 4, vocabulary=512, length=64, layers=6, width=128, heads=4),
    "hf_llama": partial(hf_llama, 4, vocabulary=512, length=64, layers=6, width=128, heads=4),
    "hf_t5": partial(hf_t5, 4, vocabulary=512, length=48, layers=4, width=128, heads=4),
    "llama": partial(llama, 4, length=128, sizes=_LLAMA),
    # The presets are this model at other sizes: one long sequence, more heads to a key, adapters.
    "llama_8b": partial(llama, 1, length=512, sizes=_LLAMA),
    "llama_70b": partial(llama, 1, length=512, sizes=replace(_LLAMA, heads=8)),
    "llama_70b_lora": partial(llama, 1, length=512, sizes=replace(_LLAMA, heads=8, rank=4)),
    "llama_small": partial(llama_small, 4, length=128, sizes=_LLAMA),
    "mlp_chain": partial(mlp_chain, 1024, layers=48, width=64, dropout=0.1),
    "resnet50": partial(resnet50, 4, image=64, width=24, classes=10),
    "resnet101": partial(resnet101, 4, image=64, width=16, classes=10),
    "resnet152": partial(resnet152, 2, image=32, width=4, classes=10),
    "resnet200": partial(resnet200, 2, image=32, width=4, classes=10),
    "unet": partial(unet, 2, image=96, width=16),
}

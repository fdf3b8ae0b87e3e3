"""Models of the papers and of today, sized by arguments. ``zoo:NAME`` on the command line.

Each entry of :data:`MODELS` is called with its batch, or with nothing for its default, and returns a case whose
forward gives the loss; ``llama_8b``, ``llama_70b`` and ``llama_70b_lora`` have one sequence and take its length. Many
take ``layers``, ``length`` or ``image`` besides (:func:`build`).
Everything is written here but ``hf_*``, which need ``transformers``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ebbtide.case import Case
from ebbtide.errors import UsageError
from ebbtide.names import require_zoo_name
from ebbtide.zoo.dcgan import DCGAN, dcgan
from ebbtide.zoo.deepspeech import DeepSpeech2, deepspeech2
from ebbtide.zoo.densenet import DenseNet, densenet121
from ebbtide.zoo.fcn import FCN8, fcn8
from ebbtide.zoo.gpt import GPT, GPTConfig, gpt, gpt2_small
from ebbtide.zoo.hf import hf_bert, hf_gpt2, hf_llama, hf_t5
from ebbtide.zoo.inception import InceptionV3, inception_v3
from ebbtide.zoo.llama import Llama, LlamaSizes, llama, llama_8b, llama_70b, llama_70b_lora, llama_small
from ebbtide.zoo.lstm_lm import LSTMLanguageModel, lstm_lm
from ebbtide.zoo.mlp_chain import MLPChain, mlp_chain
from ebbtide.zoo.mobilenet import MobileNet, mobilenet
from ebbtide.zoo.nmt import NMT, NMTConfig, nmt, nmt_luong
from ebbtide.zoo.resnet import ResNet, resnet50, resnet101, resnet152, resnet200, resnet1001, resnet2000
from ebbtide.zoo.segnet import SegNet, segnet
from ebbtide.zoo.sizes import parameters_of
from ebbtide.zoo.transformer import Transformer, TransformerConfig, transformer_base
from ebbtide.zoo.unet import UNet, unet
from ebbtide.zoo.vgg import VGG, vgg16, vgg19

__all__ = [
    "DCGAN",
    "FCN8",
    "GPT",
    "MODELS",
    "NMT",
    "VGG",
    "DeepSpeech2",
    "DenseNet",
    "GPTConfig",
    "InceptionV3",
    "LSTMLanguageModel",
    "Llama",
    "LlamaSizes",
    "MLPChain",
    "MobileNet",
    "NMTConfig",
    "ResNet",
    "SegNet",
    "Transformer",
    "TransformerConfig",
    "UNet",
    "build",
    "dcgan",
    "deepspeech2",
    "densenet121",
    "fcn8",
    "gpt",
    "gpt2_small",
    "hf_bert",
    "hf_gpt2",
    "hf_llama",
    "hf_t5",
    "inception_v3",
    "llama",
    "llama_8b",
    "llama_70b",
    "llama_70b_lora",
    "llama_small",
    "lstm_lm",
    "mlp_chain",
    "mobilenet",
    "nmt",
    "nmt_luong",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet200",
    "resnet1001",
    "resnet2000",
    "segnet",
    "sizes_of",
    "transformer_base",
    "unet",
    "vgg16",
    "vgg19",
]


class Model(Protocol):
    """A function that makes a case of an int, its batch or its length, or of nothing."""

    def __call__(self, size: int = ..., /) -> Case: ...


MODELS: dict[str, Model] = {
    "dcgan": dcgan,
    "deepspeech2": deepspeech2,
    "densenet121": densenet121,
    "fcn8": fcn8,
    "gpt": gpt,
    "gpt2_small": gpt2_small,
    "hf_bert": hf_bert,
    "hf_gpt2": hf_gpt2,
    "hf_llama": hf_llama,
    "hf_t5": hf_t5,
    "inception_v3": inception_v3,
    "llama": llama,
    "llama_70b": llama_70b,
    "llama_70b_lora": llama_70b_lora,
    "llama_8b": llama_8b,
    "llama_small": llama_small,
    "lstm_lm": lstm_lm,
    "mlp_chain": mlp_chain,
    "mobilenet": mobilenet,
    "nmt": nmt,
    "nmt_luong": nmt_luong,
    "resnet1001": resnet1001,
    "resnet101": resnet101,
    "resnet152": resnet152,
    "resnet200": resnet200,
    "resnet2000": resnet2000,
    "resnet50": resnet50,
    "segnet": segnet,
    "transformer_base": transformer_base,
    "unet": unet,
    "vgg16": vgg16,
    "vgg19": vgg19,
}


def sizes_of(name: str) -> tuple[str, ...]:
    """Which of ``"batch"``, ``"layers"``, ``"length"`` and ``"image"`` (pixels each way) the zoo's ``name`` takes.

    The one that :func:`build` is called with stands first.

    Raises:
        UsageError: if the zoo has no such model.
    """
    require_zoo_name(name)
    return tuple(parameters_of(MODELS[name]))


def build(name: str, size: int | None = None, **sizes: int) -> Case:
    """The zoo's case ``name``.

    Args:
        name: of the model.
        size: its batch, or its length where it takes that first; the model's own if ``None``.
        sizes: others by name, of those that :func:`sizes_of` lists.

    Raises:
        UsageError: if the zoo has no such model, listing those it has, if a package that it needs is missing, or for a
            size that the model does not have.
    """
    require_zoo_name(name)
    known = parameters_of(MODELS[name])
    for each in sizes:
        if each not in known:
            raise UsageError(
                f"zoo:{name} has no {each} to choose; it takes: {', '.join(known)}",
                argument=each,
                value=sizes[each],
                accepted=tuple(known),
            )
    model: Callable[..., Case] = MODELS[name]
    given = {known[each]: value for each, value in sizes.items()}
    return model(**given) if size is None else model(size, **given)

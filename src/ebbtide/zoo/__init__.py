"""Models to plan for, sized by arguments: ``zoo:NAME`` on the command line. Other packages may bring more.

Each entry of :data:`MODELS` is called with its batch, or with nothing for its default, and returns a case whose
forward gives the loss; ``llama_8b``, ``llama_70b`` and ``llama_70b_lora`` have one sequence and take its length. Many
take ``layers``, ``length`` or ``image`` besides (:func:`build`). :data:`PRESETS` has known models from their public
configurations, and :func:`model_of` makes any from its own; they take ``dtype`` and ``lora`` too.
Everything is written here but these and ``hf_*``, which need ``transformers``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from ebbtide.case import Case
from ebbtide.names import ZOO_GROUP, brought, require_zoo_name
from ebbtide.zoo.configured import Configuration, model_of
from ebbtide.zoo.gpt import GPT, GPTConfig, gpt, gpt2_small
from ebbtide.zoo.hf import hf_bert, hf_gpt2, hf_llama, hf_t5
from ebbtide.zoo.llama import Llama, LlamaSizes, llama, llama_8b, llama_70b, llama_70b_lora, llama_small
from ebbtide.zoo.mlp_chain import MLPChain, mlp_chain
from ebbtide.zoo.presets import PRESETS
from ebbtide.zoo.resnet import ResNet, resnet50, resnet101, resnet152, resnet200
from ebbtide.zoo.sizes import parameters_of, sized
from ebbtide.zoo.unet import UNet, unet

__all__ = [
    "GPT",
    "MODELS",
    "PRESETS",
    "Configuration",
    "GPTConfig",
    "Llama",
    "LlamaSizes",
    "MLPChain",
    "ResNet",
    "UNet",
    "build",
    "gpt",
    "gpt2_small",
    "hf_bert",
    "hf_gpt2",
    "hf_llama",
    "hf_t5",
    "llama",
    "llama_8b",
    "llama_70b",
    "llama_70b_lora",
    "llama_small",
    "mlp_chain",
    "model_named",
    "model_of",
    "parameters_of",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet200",
    "sized",
    "sizes_of",
    "unet",
]


class Model(Protocol):
    """A function that makes a case of an int, its batch or its length, or of nothing."""

    def __call__(self, size: int = ..., /) -> Case: ...


MODELS: dict[str, Model] = {
    "gpt": gpt,
    "gpt2_small": gpt2_small,
    "hf_bert": hf_bert,
    "hf_gpt2": hf_gpt2,
    "hf_llama": hf_llama,
    "hf_t5": hf_t5,
    "llama": llama,
    "llama_70b": llama_70b,
    "llama_70b_lora": llama_70b_lora,
    "llama_8b": llama_8b,
    "llama_small": llama_small,
    "mlp_chain": mlp_chain,
    "resnet101": resnet101,
    "resnet152": resnet152,
    "resnet200": resnet200,
    "resnet50": resnet50,
    "unet": unet,
}


def sizes_of(name: str) -> tuple[str, ...]:
    """Which of ``"batch"``, ``"layers"``, ``"length"``, ``"image"``, ``"dtype"`` and ``"lora"`` ``name`` takes.

    The one that :func:`build` is called with stands first. An image has as many pixels each way.

    Raises:
        UsageError: if the zoo has no such model.
    """
    return tuple(parameters_of(model_named(name)))


def build(name: str, size: int | None = None, **sizes: int | str) -> Case:
    """The zoo's case ``name``.

    Args:
        name: of the model.
        size: its batch, or its length where it takes that first; the model's own if ``None``.
        sizes: others by name, of those that :func:`sizes_of` lists.

    Raises:
        UsageError: if the zoo has no such model, listing those it has, if a package that it needs is missing, or for a
            size that the model does not have.
    """
    return sized(model_named(name), f"zoo:{name}", size, sizes)


def model_named(name: str) -> Callable[..., Case]:
    """The function of :data:`MODELS` or :data:`PRESETS`, or the one that another package brings under this name.

    Raises:
        UsageError: if the zoo has no such model, listing those it has.
    """
    require_zoo_name(name)
    if name in MODELS:
        return MODELS[name]
    if name in PRESETS:
        return PRESETS[name]
    module, _, function = brought(ZOO_GROUP)[name].partition(":")
    return getattr(import_module(module), function)

"""Names that users type: what they may have meant, and which models the zoo has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ebbflow.errors import UsageError

__all__ = ["ZOO", "did_you_mean", "require_zoo_name"]

ZOO = (
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
    "llama_70b",
    "llama_70b_lora",
    "llama_8b",
    "llama_small",
    "lstm_lm",
    "mlp_chain",
    "mobilenet",
    "nmt",
    "nmt_luong",
    "resnet1001",
    "resnet101",
    "resnet152",
    "resnet200",
    "resnet2000",
    "resnet50",
    "segnet",
    "transformer_base",
    "unet",
    "vgg16",
    "vgg19",
)
"""What ``zoo:NAME`` may name; here, so that who mistypes one is answered without importing the models and torch."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` with the known name that is nearest to ``name``; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def require_zoo_name(name: str) -> None:
    """Refuse a name that no model of the zoo has.

    Raises:
        UsageError: listing those there are.
    """
    if name not in ZOO:
        raise UsageError(
            f"the zoo has no model {name!r}; it has: {', '.join(ZOO)}{did_you_mean(name, ZOO)}",
            argument="case",
            value=name,
            accepted=ZOO,
        )

"""The models of the GPU tier: today's sizes on a card, toys on CPU; each knows its blocks and its arithmetic.

A subject's batch on a card is for 80 GiB and scales with the card's memory, so that the step that keeps everything
takes about a quarter of it; the table's ``share of card`` says how much it took.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ebbtide import Case
from ebbtide.zoo import GPTConfig, LlamaSizes, gpt, hf_bert, hf_llama, llama, resnet50, unet

__all__ = ["CASES", "PRECISIONS", "SUBJECTS", "Subject", "build", "loss_of"]

PRECISIONS = ("float32", "bfloat16")
_CARD_BYTES = 80 * 2**30
_RANK = 16


class _InAutocast(nn.Module):
    """A model under bf16 autocast: the same region for every method."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.kind, dtype=torch.bfloat16):
            return self.model(*args, **kwargs)


@dataclass(frozen=True)
class Subject:
    """A model of the tier.

    Attributes:
        card: its case on a card, from its batch.
        batch: of a card of 80 GiB, per precision.
        toy: its case on CPU.
        blocks: the names of modules, or of lists of modules, that PyTorch's users put under a checkpoint each.
    """

    card: Callable[[int], Case]
    batch: dict[str, int]
    toy: Callable[[], Case]
    blocks: tuple[str, ...]


def _gpt(batch: int) -> Case:
    """GPT-2 medium's blocks, with its dropout."""
    return gpt(batch, GPTConfig(vocabulary=50_304, length=1024, layers=24, width=1024, heads=16, dropout=0.1))


def _llama(batch: int) -> Case:
    """A Llama of 0.4 billion parameters; attention dropout 0.1."""
    return hf_llama(batch, vocabulary=32_000, length=1024, layers=16, width=1280, heads=20)


def _adapted(case: Case, rank: int) -> Case:
    """The case with LoRA adapters by peft, dropout among them."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    # Without gradients into the embedding's output a checkpoint would train nothing; ``get_peft_model`` leaves it.
    return Case(get_peft_model(case.model, config).train(), case.args, case.kwargs, name=f"{case.name}-lora")


def _lora(batch: int) -> Case:
    if find_spec("peft") is not None:
        return _adapted(_llama(batch), _RANK)
    sizes = LlamaSizes(vocabulary=32_000, layers=16, width=1280, hidden=3413, heads=20, key_heads=10, rank=_RANK)
    return llama(batch, length=1024, sizes=sizes, name="llama-lora")


def _toy_lora() -> Case:
    if find_spec("peft") is not None:
        return _adapted(_toy_llama(), 4)
    return llama(2, length=16, sizes=LlamaSizes(vocabulary=64, layers=2, width=16, hidden=32, heads=2, rank=4))


def _toy_llama() -> Case:
    return hf_llama(2, vocabulary=64, length=16, layers=2, width=16, heads=2)


SUBJECTS: dict[str, Subject] = {
    "gpt": Subject(
        _gpt,
        {"float32": 8, "bfloat16": 12},
        lambda: gpt(4, GPTConfig(vocabulary=64, length=16, layers=1, width=16, heads=2, dropout=0.1)),
        ("blocks",),
    ),
    "llama": Subject(_llama, {"float32": 8, "bfloat16": 12}, _toy_llama, ("layers",)),
    "llama-lora": Subject(_lora, {"float32": 8, "bfloat16": 12}, _toy_lora, ("layers", "blocks")),
    "bert": Subject(
        lambda batch: hf_bert(batch, vocabulary=30_522, length=512, layers=12, width=768, heads=12),
        {"float32": 24, "bfloat16": 32},
        lambda: hf_bert(2, vocabulary=64, length=16, layers=2, width=16, heads=2),
        ("layer",),
    ),
    "resnet50": Subject(
        lambda batch: resnet50(batch, image=224),
        {"float32": 192, "bfloat16": 320},
        lambda: resnet50(2, image=32, width=8, classes=10),
        ("stages",),
    ),
    "unet": Subject(
        lambda batch: unet(batch, image=512),
        {"float32": 8, "bfloat16": 12},
        lambda: unet(1, image=32, width=4, levels=2),
        ("down", "merge"),
    ),
}
CASES = tuple(f"{name}-{precision}" for name in SUBJECTS for precision in PRECISIONS)


def build(case: str, kind: str, total_bytes: int, *, toy: bool) -> Case:
    """The case ``NAME-PRECISION`` on a device of ``kind``, with the same weights and inputs at every call."""
    name, _, precision = case.rpartition("-")
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    plain = subject.toy() if toy else subject.card(max(1, round(subject.batch[precision] * total_bytes / _CARD_BYTES)))
    model = plain.model.train() if kind == "cpu" else plain.model.to(kind).train()  # fake parameters cannot move
    if precision == "bfloat16":
        model = _InAutocast(model, kind)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(kind), (plain.args, dict(plain.kwargs)))
    return Case(model, args, kwargs, name=f"{plain.name}-{precision}")


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss of a zoo model or of one of transformers."""
    return outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]

"""Libra's four models, card and budget, and the planners of its table.

1. Models and sizes are those of the scripts beside the published prototype: ResNet-50 and ResNet-152 on images of
   128 x 128, GPT-2 small on 512 tokens, and its toy Llama (8 layers, width 512, 256 tokens, a vocabulary of 2k).
2. The budget is the card's whole ``memory_bytes``, resident bytes included, for every planner alike. What a process
   takes besides and what fragments are not taken off, as in the paper.
3. Costs are by roofline: all seconds are *predicted*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ebbtide import Case
from ebbtide.planners.registry import moves_buffers
from ebbtide.step.machine import machine_named
from ebbtide.zoo.gpt import GPT2_SMALL, gpt2_small
from ebbtide.zoo.llama import llama_small
from ebbtide.zoo.resnet import resnet50, resnet152
from harness.batched import Batched

__all__ = ["BUDGET", "DEFAULT", "MACHINE", "MODELS", "PLANNERS", "batched", "tiers_of"]

MACHINE = machine_named("v100-16gb")
BUDGET = MACHINE.memory_bytes
MODELS: dict[str, tuple[Callable[[int], Case], tuple[int, int]]] = {
    "resnet50": (lambda batch: resnet50(batch, image=128), (256, 2048)),
    "resnet152": (lambda batch: resnet152(batch, image=128), (128, 1024)),
    "gpt2_small": (lambda batch: gpt2_small(batch, replace(GPT2_SMALL, length=512)), (16, 48)),
    "llama_small": (lambda batch: llama_small(batch), (64, 1024)),
}
"""Per model its case of a batch, and two batches to interpolate between."""
DEFAULT = "auto"
RECOMPUTING = "auto (no tiers)"
PLANNERS: dict[str, str] = {
    DEFAULT: "auto",
    RECOMPUTING: "auto",
    "libra": "libra",
    "libra:overlap=true": "libra:overlap=true",
    "checkmate_lp": "checkmate_lp",
    "swap": "swap",
    "tflms": "tflms",
    "capuchin": "capuchin",
    "per_block": "per_block",
}
"""Per row of the table its planner."""


def tiers_of(label: str) -> tuple[str, ...]:
    """The tiers that a row's planner may move to."""
    return ("host",) if label != RECOMPUTING and moves_buffers(PLANNERS[label]) else ()


def batched(name: str) -> Batched:
    """A model at any batch."""
    make, between = MODELS[name]
    return Batched(make, MACHINE, between)

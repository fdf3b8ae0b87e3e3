"""Classes of Hugging Face's library on random weights, each judged by :mod:`suite.judge`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from harness.record import Row
from suite.judge import judged
from suite.senses import SENSES
from suite.subject import NotSupported, Subject
from suite.summary import summary_of
from suite.text import TEXT

TITLE = "Hugging Face classes: captured, bits, budget, peers"
MODELS = {**TEXT, **SENSES}
CASES = tuple(MODELS)
QUICK = ("BertForMaskedLM", "LlamaForCausalLM", "ViTForImageClassification")


def build(name: str) -> Subject:
    """The class ``name`` with random weights, and its batch."""
    import transformers

    config, settings, batch = MODELS[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**settings)).train()
    return Subject(model, batch(), checkpoint)


def checkpoint(model: Any) -> None:
    """The library's own switch."""
    if not model.supports_gradient_checkpointing:
        raise NotSupported("the class has no gradient checkpointing")
    model.activation_checkpointing_enable({"use_reentrant": False})


def rows(case: str, quick: bool) -> Iterator[Row]:
    yield from judged("hugging_face", case, partial(build, case), quick=quick)


def summary(rows: Sequence[Row]) -> Iterator[Row]:
    yield from summary_of("hugging_face", CASES, rows)

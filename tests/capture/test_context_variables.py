"""Context variables in a forward: what it sets it reads; what others set makes another step; none stays set."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from eager_steps import assert_trains_as_eager, history
from ebbtide.errors import CaptureError

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
SCALE: ContextVar[float | None] = ContextVar("scale", default=None)
RECORD: ContextVar[list[torch.Tensor] | None] = ContextVar("record", default=None)
EMPTY: ContextVar[float] = ContextVar("empty")

hf = pytest.importorskip("transformers")


class Model(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def layer(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(m.one(x))
    if (record := RECORD.get()) is not None:
        record.append(h)
    return m.two(h)


def records(m: Any, x: torch.Tensor) -> torch.Tensor:
    """What layers return, but not in an inner call: as transformers records outputs."""
    found: list[torch.Tensor] = []
    outer = RECORD.set(found)
    try:
        h = layer(m, x)
        inner = RECORD.set(None)
        try:
            h = layer(m, h)
        finally:
            RECORD.reset(inner)
        layer(m, h)
    finally:
        RECORD.reset(outer)
    assert RECORD.get() is None
    return torch.stack(found).sum() * len(found)


def scaled(m: Any, x: torch.Tensor) -> torch.Tensor:
    scale = SCALE.get()
    return m.one(x).square().mean() * (1.0 if scale is None else scale)


@pytest.fixture
def other_scale() -> Iterator[None]:
    token = SCALE.set(3.0)
    yield
    SCALE.reset(token)


@pytest.mark.parametrize("body", [records, scaled])
def test_what_a_forward_sets_it_reads(body: Callable[..., Any]) -> None:
    assert_trains_as_eager(Model(body), lambda: (X,))


def test_what_others_set_is_another_step() -> None:
    model = Model(scaled)
    plain = copy.deepcopy(model)
    ebbtide.fit(model, "1GiB")
    for scale in (None, 3.0, None, 2.0):
        token = SCALE.set(scale)
        mine, theirs = (history(each, lambda: (X,), 1) for each in (model, plain))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None)
        SCALE.reset(token)


def stays_set(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.one(x)
    SCALE.set(2.0)
    return h.sum()


def without_value(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.one(x)
    scale = EMPTY.get(2.0)
    return h.sum() * scale


DYNAMO_READS_IT = pytest.mark.skipif(torch.__version__ >= "2.14", reason="Dynamo reads it, and guards that it has none")


@pytest.mark.parametrize(
    ("body", "why"),
    [(stays_set, "is still set"), pytest.param(without_value, "has no value", marks=DYNAMO_READS_IT)],
)
def test_what_no_step_can_do_is_refused_at_its_line(body: Callable[..., Any], why: str) -> None:
    model = ebbtide.fit(Model(body), "1GiB")
    with pytest.raises(CaptureError, match=why) as refused:
        model(X)
    assert refused.value.source == f"test_context_variables.py:{body.__code__.co_firstlineno + 2}"
    assert SCALE.get() is None


def test_a_model_within_a_model_that_records_outputs_is_captured() -> None:
    """GIT's picture encoder resets the variable in which its text model records."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 8, "patch_size": 4}  # fmt: skip
    sizes = hf.GitConfig(
        vision_config=vision, vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, use_cache=False, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.GitForCausalLM(sizes).train()
    plain = copy.deepcopy(model)
    ebbtide.fit(model, "200%", progress=None)
    tokens, images = torch.randint(5, 32, (2, 8)), torch.randn(2, 3, 8, 8)
    losses: list[torch.Tensor] = []
    for each in (model, plain):
        torch.manual_seed(1)
        losses.append(each(input_ids=tokens, pixel_values=images, labels=tokens).loss)
        losses[-1].backward()
    assert torch.equal(*losses)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None and theirs.grad is None) or torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    assert ebbtide.calls_of(model).planned == 1

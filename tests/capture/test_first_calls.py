"""What a library does at a model's first call, and no graph can hold, is done and the call captured again."""

from __future__ import annotations

import copy

import pytest
import torch

import ebbtide
from ebbtide.capture.first_calls import after_first_calls
from ebbtide.errors import CaptureError

hf = pytest.importorskip("transformers")


def segformer() -> torch.nn.Module:
    sizes = hf.SegformerConfig(
        num_labels=5, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    return hf.SegformerForSemanticSegmentation(sizes).train()


def trained(model: torch.nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    loss = model(pixel_values=torch.randn(2, 3, 32, 32), labels=torch.randint(5, (2, 32, 32))).loss
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def test_hooks_that_record_outputs_are_put_on_before_the_capture() -> None:
    model = segformer()
    expected = trained(copy.deepcopy(model))
    ebbtide.fit(model, "150%", progress=None)
    assert all(map(torch.equal, trained(model), expected))
    assert ebbtide.calls_of(model).planned == 1


def test_other_refusals_stay_what_they_are() -> None:
    tries: list[int] = []

    def attempt() -> None:
        tries.append(1)
        raise CaptureError("it branches", remedy="do not", source="model.py:3")

    with pytest.raises(CaptureError, match="it branches"):
        after_first_calls(attempt, segformer())
    assert len(tries) == 1


def test_a_refusal_there_that_is_not_about_hooks_is_told_after_one_more_try() -> None:
    tries: list[int] = []

    def attempt() -> None:
        tries.append(1)
        raise CaptureError("a lock", remedy="none", source="output_capturing.py:239")

    model = segformer()
    with pytest.raises(CaptureError, match="a lock"):
        after_first_calls(attempt, model)
    assert len(tries) == 2
    with pytest.raises(CaptureError, match="a lock"):
        after_first_calls(attempt, model)
    assert len(tries) == 3  # all hooks are there now

"""The oracle of tests of trainers: what a training leaves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["NO_GRADIENTS", "assert_left_alike", "drawn", "left_by", "tiny_gpt2"]

NO_GRADIENTS = "no gradients (torch.no_grad or inference_mode)"


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Tokens, from a generator of their own."""
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))


def tiny_gpt2(**settings: Any) -> Any:
    """A GPT-2 with its dropout on, the same one at every call."""
    import transformers as hf

    given: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 96}
    words: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "use_cache": False}
    torch.manual_seed(1)
    config: Any = hf.GPT2Config(**(given | words | settings))
    return hf.GPT2LMHeadModel(config).train()


def left_by(model: torch.nn.Module, told: Sequence[Any] = ()) -> dict[str, Any]:
    """Parameters, buffers and generators' states, and what was ``told`` on the way."""
    return {
        "told": [each.item() if isinstance(each, torch.Tensor) else each for each in told],
        "state": {key: value.clone() for key, value in model.state_dict().items()},
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"],
    }


def assert_left_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit by bit."""
    assert one["told"] == other["told"]
    assert one["told"], "nothing was told, so nothing was compared"
    assert one["state"].keys() == other["state"].keys()
    for key, value in one["state"].items():
        assert torch.equal(value, other["state"][key]), key
    assert torch.equal(one["torch"], other["torch"])
    assert one["python"] == other["python"]
    assert np.array_equal(one["numpy"], other["numpy"])

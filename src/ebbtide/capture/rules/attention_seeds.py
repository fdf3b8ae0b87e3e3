"""Where the memory-efficient attention of CUDA leaves what its dropout drew from.

Outside of CUDA graphs its kernel returns seed and offset as tensors on the host, and its backward reads them there
(``_efficient_attention_forward`` and ``_efficient_attention_backward``, aten/src/ATen/native/transformers/cuda, torch
2.11 to 2.13). Fake tensors say that they are on the card. A backward that is run alone on such made-up arguments reads
an address of the card on the host, and the process is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ebbtide.torch_seams.fake_tensors import Dispatch, FakeTensor, FakeTensorMode, described_by, fake_device

__all__ = ["seeds_on_the_host"]

_aten = torch.ops.aten
_SEEDS = (2, 3)
_DRAWING = frozenset(
    {_aten._scaled_dot_product_efficient_attention.default, _aten._efficient_attention_forward.default}
)
"""Both return seed and offset at these places."""


@contextmanager
def seeds_on_the_host() -> Iterator[None]:
    """While open, fake tensors of this thread say so."""
    with described_by(_moved, name="seeds"):
        yield


def _moved(described: Dispatch) -> Dispatch:
    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        results = described(mode, func, types, args, kwargs)
        if func not in _DRAWING or not isinstance(results, tuple):
            return results
        moved = list(results)
        for place in _SEEDS:
            each = moved[place]
            if isinstance(each, FakeTensor) and fake_device(each).type == "cuda":
                with mode:
                    moved[place] = torch.empty((), dtype=each.dtype, device="cpu")
        return tuple(moved)

    return dispatch

"""The arithmetic of a head's ops, told to PyTorch: products of N x D, D x V. Rooflines and ``FlopCounterMode`` ask.

Without it an op of three products would count as its traffic alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ebbtide.rewrites.heads.kernels import NAMESPACE
from ebbtide.torch_seams.dispatcher import flop_registry, register_flop_formula

__all__ = ["PRODUCTS", "tell_flops"]

_H_AND_WT = {"backward_over_kept": 1, "settle_guess": 2, "backward_by_other_columns": 2}
"""Where an op takes the hidden states, with the weight behind them; at 0 unless it is here."""
PRODUCTS: dict[str, Callable[..., float]] = {
    "forward_by_rows": lambda *_: 1,
    "forward_with_guess": lambda *_: 2,
    "forward_that_keeps": lambda *_: 1,
    "backward_over_kept": lambda *call: 1 + bool(call[-1]),
    "backward_by_rows": lambda *_: 2,
    "settle_guess": lambda *_: 0,  # where it was right
    "backward_by_columns": lambda *_: 2,
    "backward_by_other_columns": lambda known, _, __, wt, *___: 2 - known.shape[1] / wt.shape[1],
}
"""By the op's name, how many products of the head's size it makes, of its arguments."""


def tell_flops() -> None:
    """Once in a process."""
    for name, products in PRODUCTS.items():
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        if packet not in flop_registry:
            register_flop_formula(packet, get_raw=True)(partial(_flops, products, _H_AND_WT.get(name, 0)))


def _flops(products: Callable[..., float], at: int, *call: Any, out_val: object = None) -> int:
    h, wt = call[at], call[at + 1]
    return round(2 * h.numel() * wt.shape[1] * products(*call))

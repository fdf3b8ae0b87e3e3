"""Same bits, within budget, as predicted: whole steps compared on a grid of budgets and thread counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import ebbtide
from ebbtide.zoo import GPTConfig, gpt, mlp_chain
from harness.record import Row
from harness.verified import grid_rows

TITLE = "Bits, budget and prediction (planned step against captured order and eager)"
SHARES = (0.6, 0.4, 0.2)


def _gpt(dropout: float, tied: bool) -> Callable[[], ebbtide.Case]:
    config = GPTConfig(vocabulary=512, length=64, layers=3, width=64, heads=4, dropout=dropout, tied=tied)
    return lambda: gpt(4, config)


CASES: dict[str, Callable[[], ebbtide.Case]] = {
    "mlp_chain": lambda: mlp_chain(256, layers=12, width=64),
    "mlp_chain dropout 0.1": lambda: mlp_chain(256, layers=12, width=64, dropout=0.1),
    "gpt tied": _gpt(0.0, True),
    "gpt untied": _gpt(0.0, False),
    "gpt tied dropout 0.1": _gpt(0.1, True),
    "gpt untied dropout 0.1": _gpt(0.1, False),
}
QUICK = ("mlp_chain dropout 0.1", "gpt tied dropout 0.1")


def rows(name: str, quick: bool) -> Iterator[Row]:
    """Every budget at one and two threads."""
    for threads in (1,) if quick else (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        yield from grid_rows("bits", name, CASES[name](), shares=(0.4,) if quick else SHARES)

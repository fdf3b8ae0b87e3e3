"""Peaks and CPU seconds of one training step, the same way for every method.

1. A step is forward and backward with no gradients at its start, so parameter gradients count in its peak.
2. Peaks are bytes above the step's start, by ``ebbtide.measure``.
3. CPU seconds come from rounds in which every method runs once: what else the machine does then falls on all of
   them. A ratio is given twice, of the best steps and as the median over rounds of same-round ratios.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import ebbtide

__all__ = ["Times", "above_bytes", "interleaved", "step"]


TICK_SECONDS = 1e-9
"""What a step takes by a clock of CPU time that stood still: a guest's does, while it pays back what the host took."""


def clear(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def step(run: Callable[..., Any], args: Sequence[Any]) -> float:
    """Forward and backward; the loss."""
    loss = run(*args)
    loss.backward()
    return float(loss.detach())


def above_bytes(model: torch.nn.Module, run: Callable[..., Any], args: Sequence[Any]) -> int:
    """Peak of a step above its start; ``run`` is what is called, the model or its compiled form."""
    clear(model)
    with ebbtide.measure(model) as gauge:
        step(run, args)
    clear(model)
    return gauge.above_bytes


@dataclass(frozen=True)
class Times:
    """CPU seconds of one method's steps, one per round. None is nothing: see :data:`TICK_SECONDS`."""

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", tuple(max(each, TICK_SECONDS) for each in self.seconds))

    @property
    def best(self) -> float:
        """The least that a step took, of those that the clock saw."""
        return min((each for each in self.seconds if each > TICK_SECONDS), default=TICK_SECONDS)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def best_ratio(self, base: Times) -> float:
        return self.best / base.best

    def median_ratio(self, base: Times) -> float:
        return statistics.median(a / b for a, b in zip(self.seconds, base.seconds, strict=True))

    def median_ratio_interval(self, base: Times) -> tuple[float, float]:
        """Where :meth:`median_ratio` lies at 95 % and more, by its order statistics; of few rounds, all of them."""
        ratios = sorted(a / b for a, b in zip(self.seconds, base.seconds, strict=True))
        count, outside, below = len(ratios), 0.0, 0
        while (outside := outside + math.comb(count, below) / 2**count) <= 0.025:
            below += 1  # so many may be left out on either side
        below = max(below - 1, 0)
        return ratios[below], ratios[-1 - below]


def interleaved(
    methods: Mapping[str, tuple[torch.nn.Module, Callable[..., Any]]], args: Sequence[Any], rounds: int
) -> dict[str, Times]:
    """CPU seconds of each method's step over ``rounds`` rounds, after one round that does not count.

    Args:
        methods: by name, the model (whose gradients are cleared) and what is called.
        args: of the call.
        rounds: how many.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(rounds + 1):
        for name, (model, run) in methods.items():
            clear(model)
            begin = time.process_time()
            step(run, args)
            spent = time.process_time() - begin
            clear(model)
            if turn:
                seconds[name].append(spent)
    return {name: Times(tuple(values)) for name, values in seconds.items()}

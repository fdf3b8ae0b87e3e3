"""What a step leaves, bit by bit, with its peak; and what a refusal or a failure says, in one line."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import ebbtide
from harness.children import short_error
from suite.methods import Method

__all__ = ["differences", "measured", "off_by", "told", "without_paths"]


def measured(method: Method) -> tuple[int, dict[str, Tensor]]:
    """Peak above the start of a step, and all that the step leaves."""
    model = method.subject.model
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(method.subject.buffers[name])
    model.zero_grad()
    torch.manual_seed(1)
    with ebbtide.measure(model) as gauge:
        loss = method.step()
    left = {"loss": loss, "random state": torch.get_rng_state()}
    left |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    left |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    model.zero_grad()
    return gauge.above_bytes, left


def differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """What has other bits, or is there in one alone."""
    names = dict.fromkeys([*theirs, *ours])
    return [name for name in names if not _same_bits(ours.get(name), theirs.get(name))]


def _same_bits(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    left, right = (each.contiguous().reshape(-1).view(torch.uint8) for each in (ours, theirs))
    return torch.equal(left, right)


def off_by(ours: Tensor | None, theirs: Tensor | None) -> float:
    """The largest difference over the largest value of eager's."""
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return float("inf")
    if not theirs.is_floating_point():
        return 0.0  # random states and counters: they differ, by no amount that says anything
    off = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(torch.finfo(theirs.dtype).tiny)
    return float(off)


def told(error: BaseException) -> str:
    """Kind and first line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return without_paths(short_error([f"{type(error).__name__}: {(lines or [''])[0]}"]))[:300]


def without_paths(text: str) -> str:
    """Files of installed packages by their path in the package."""
    head, found, tail = text.rpartition("site-packages/")
    return (head.rpartition(" ")[0] + " " + tail).strip() if found else text

"""Measured costs on disk: one JSON file per device, thread count, torch build and flags, written atomically.

A cost is keyed by all that it depends on; a damaged or foreign file is measured again, never trusted.
"""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.cost.profile import Cost
from ebbtide.files import EntryFile

__all__ = ["CostCache", "device_context", "product_precisions"]

_EXACT = "ieee"
_MOST_BYTES, _MOST_SECONDS = 2**50, 1e6  # of one op: a pebibyte, eleven days


def device_context(device: str) -> dict[str, str]:
    """What a cost depends on besides the call: device, threads, torch build and flags."""
    matmul = torch.backends.cuda.matmul
    context = {
        "device": device,
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    if device == "cuda":
        context["name"] = torch.cuda.get_device_name()
        context["tf32"] = f"{matmul.allow_tf32} {torch.backends.cudnn.allow_tf32}"
        context["cudnn"] = f"{torch.backends.cudnn.benchmark} {torch.backends.cudnn.deterministic}"
    else:
        context["name"] = torch.backends.cpu.get_cpu_capability()
        context["mkldnn"] = str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)
        if (precision := product_precisions()[0]) != _EXACT:  # oneDNN's products of 16 bits make copies
            context["products"] = precision
    if (default := torch.get_default_dtype()) is not torch.float32:  # what an integer divided by a number has
        context["default"] = str(default)
    return context


def product_precisions() -> tuple[str, str]:
    """In what products of float32 may be computed, on a CPU and on a card: ``torch.set_float32_matmul_precision``.

    Read per backend: torch's own question for all raises where these differ.
    """
    backends = torch.backends.mkldnn, torch.backends.cuda
    cpu, card = [str(each.matmul.fp32_precision).replace("none", _EXACT) for each in backends]  # none is said: ieee
    return cpu, card


class CostCache(EntryFile[Cost]):
    """Costs on disk; their context is a :func:`device_context`."""

    name = "costs"
    schema = "ebbtide-costs/4"

    def from_json(self, value: Any) -> Cost:
        """A cost; raises ``ValueError`` if it can be none."""
        seconds, workspace, kept = value
        cost = Cost(float(seconds), int(workspace), tuple(map(int, kept)))
        sizes = (cost.workspace_bytes, *cost.kept_bytes)
        if not (0 <= cost.seconds <= _MOST_SECONDS and all(0 <= size <= _MOST_BYTES for size in sizes)):
            raise ValueError(f"{cost} is of no op")
        return cost

    def to_json(self, entry: Cost) -> object:
        """Seconds and bytes."""
        return [entry.seconds, entry.workspace_bytes, entry.kept_bytes]

"""Measured costs on disk: one JSON file per device, thread count, torch build and flags, written atomically.

A cost is keyed by all that it depends on; a damaged or foreign file is measured again, never trusted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ebbtide.cost.profile import Cost
from ebbtide.files import cache_directory, keep, read_saved

__all__ = ["CostCache", "device_context", "product_precisions"]

_EXACT = "ieee"
_SCHEMA = "ebbtide-costs/4"
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


def _is_sound(cost: Cost) -> bool:
    """Whether a cost read from disk can be one."""
    sizes = (cost.workspace_bytes, *cost.kept_bytes)
    return 0 <= cost.seconds <= _MOST_SECONDS and all(0 <= size <= _MOST_BYTES for size in sizes)


class CostCache:
    """Costs of one device context on disk.

    Args:
        context: from :func:`device_context`.
        directory: :func:`cache_directory` if ``None``.
    """

    def __init__(self, context: Mapping[str, str], directory: Path | None = None) -> None:
        self._context = dict(context)
        digest = hashlib.sha256(json.dumps(self._context, sort_keys=True).encode()).hexdigest()[:16]
        self.path = (directory or cache_directory()) / f"costs-{digest}.json"

    def load(self) -> dict[str, Cost]:
        """All costs on disk by signature; empty if there is no file of ours."""
        data = read_saved(self.path)
        try:
            if data is None or data["schema"] != _SCHEMA or data["context"] != self._context:
                return {}
            costs = {key: Cost(float(s), int(w), tuple(map(int, k))) for key, (s, w, k) in data["costs"].items()}
        except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError):
            return {}
        return costs if all(map(_is_sound, costs.values())) else {}

    def add(self, costs: Mapping[str, Cost]) -> None:
        """Add ``costs`` to what is on disk; a cache that cannot be written is left alone."""

        def merged() -> dict[str, Any]:
            every = {**self.load(), **costs}
            rows = {key: [c.seconds, c.workspace_bytes, c.kept_bytes] for key, c in every.items()}
            return {"schema": _SCHEMA, "context": self._context, "costs": rows}

        keep(self.path, self.path.with_name(f"{self.path.name}.lock"), merged)

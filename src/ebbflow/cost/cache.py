"""Measured costs on disk: one JSON file per device, thread count, torch build and flags, written atomically.

A cost is keyed by all that it depends on; a damaged or foreign file is measured again, never trusted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import torch

from ebbflow.cost.profile import Cost
from ebbflow.files import cache_directory, write_json

__all__ = ["CostCache", "device_context"]

_SCHEMA = "ebbflow-costs/2"


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
        context["mkldnn"] = str(torch.backends.mkldnn.is_available())
    return context


def _is_sound(cost: Cost) -> bool:
    """Whether a cost read from disk can be one."""
    return 0 <= cost.seconds < float("inf") and all(size >= 0 for size in (cost.workspace_bytes, *cost.kept_bytes))


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
        try:
            data: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
            if data["schema"] != _SCHEMA or data["context"] != self._context:
                return {}
            costs = {key: Cost(float(s), int(w), tuple(map(int, k))) for key, (s, w, k) in data["costs"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return {}
        return costs if all(map(_is_sound, costs.values())) else {}

    def add(self, costs: Mapping[str, Cost]) -> None:
        """Add ``costs`` to what is on disk; a cache that cannot be written is left alone."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{self.path}.lock", timeout=10):
                merged = {**self.load(), **costs}
                data = {
                    "schema": _SCHEMA,
                    "context": self._context,
                    "costs": {key: [c.seconds, c.workspace_bytes, c.kept_bytes] for key, c in merged.items()},
                }
                write_json(self.path, data)
        except (OSError, filelock.Timeout):
            return

"""torchvision where its compiled ops do not load: its classifiers need none of them, but its import names two.

The wheels of PyPI are built against CUDA and do not load beside a CPU build of torch. The ops are declared then,
without an implementation, and the import succeeds; a model that called one would fail.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["batch", "import_torchvision", "lacking"]

CLASSES = 10
_DECLARED: list[torch.library.Library] = []
"""A declaration lasts as long as its library."""


def lacking(package: str) -> str:
    """What has to be installed for models of ``package``; empty if nothing."""
    missing = [each for each in ("torchvision", package) if find_spec(each) is None]
    return f"{missing[-1]} is not installed: make suite-vision" if missing else ""


def import_torchvision() -> Any:
    """The package, with the ops of its import declared if its compiled ops do not load."""
    try:
        return import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)
        return import_module("torchvision")


def batch(images: int, side: int) -> dict[str, torch.Tensor]:
    """Images and their classes."""
    return {"x": torch.randn(images, 3, side, side), "target": torch.arange(images) % CLASSES}

"""What a library does once, at a model's first call, and no graph can hold: done for it, and the call captured again.

transformers puts hooks on a model that record what its layers return, when a forward first asks for that: Wav2Vec2's
classifiers and SegFormer do. It does so under a lock, at which a trace ends. The hooks are those that eager's first
call leaves behind; they do nothing unless somebody records.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from ebbtide.errors import CaptureError

__all__ = ["after_first_calls"]

_Result = TypeVar("_Result")
_RECORDING = "transformers.utils.output_capturing"


def after_first_calls(attempt: Callable[[], _Result], module: torch.nn.Module) -> _Result:
    """What ``attempt``, a capture of a call of ``module``, returns or raises, tried again if there is reason to."""
    try:
        return attempt()
    except CaptureError as error:
        if not (error.source or "").startswith("output_capturing.py") or not _hooks_put_on(module):
            raise
    return attempt()


def _hooks_put_on(module: torch.nn.Module) -> bool:
    """Put the hooks on all of transformers' models in ``module``; whether there were any to put on."""
    recording = sys.modules.get(_RECORDING)
    install = getattr(recording, "maybe_install_capturing_hooks", None)
    models = sys.modules.get("transformers.modeling_utils")
    if install is None or models is None:
        return False
    found = [
        each
        for each in module.modules()
        if isinstance(each, models.PreTrainedModel) and not getattr(each, "_output_capturing_hooks_installed", False)
    ]
    for each in found:
        install(each)
    return bool(found)

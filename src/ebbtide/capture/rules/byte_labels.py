"""Classes as bytes: the kernels of the likelihood loss read ``uint8`` labels, and torch's descriptions refuse them.

``F.cross_entropy`` of rows takes labels of ``int64`` or ``uint8`` (``aten/src/ATen/native/LossNLL.cpp``). The
description gathers by them, which takes no bytes, so a trace would fail where eager runs. What is described does not
depend on the labels' type.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ebbtide.torch_seams.fake_tensors import Dispatch, FakeTensor, FakeTensorMode, described_by

__all__ = ["byte_labels"]

_aten = torch.ops.aten
_LABELS = {_aten.nll_loss_forward.default: 1, _aten.nll_loss_backward.default: 2}
"""By operator, which argument the labels are."""


@contextmanager
def byte_labels() -> Iterator[None]:
    """While open, likelihood losses of bytes are described on this thread as those of integers."""
    with described_by(_of_integers, name="byte labels"):
        yield


def _of_integers(described: Dispatch) -> Dispatch:
    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        place = _LABELS.get(func, len(args))
        if place < len(args) and isinstance(args[place], FakeTensor) and args[place].dtype is torch.uint8:
            with mode:
                labels = args[place].long()
            args = (*args[:place], labels, *args[place + 1 :])
        return described(mode, func, types, args, kwargs)

    return dispatch

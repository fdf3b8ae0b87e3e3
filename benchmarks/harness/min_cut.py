"""PyTorch's min-cut partitioner under ``activation_memory_budget``, its graphs run op by op: no compiler is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["budget_of", "min_cut_compiled"]


def min_cut_compiled(model: torch.nn.Module) -> Any:
    """The compiled form of ``model``; the partitioner reads its budget at the first call."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    backend = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition
    )
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


@contextlib.contextmanager
def budget_of(share: float) -> Iterator[None]:
    """``activation_memory_budget=share`` for what is compiled within; methods that live side by side stay compiled.

    Each is one entry in the cache of the same forward's code.
    """
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config

    limit = dynamo_config.patch(recompile_limit=64)
    with limit, config.patch(activation_memory_budget=share, enable_autograd_cache=False):
        yield

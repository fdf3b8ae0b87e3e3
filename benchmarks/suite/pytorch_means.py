"""What else PyTorch offers to train with less memory: selective checkpoints, ``save_on_cpu``, Inductor.

1. A *selective policy* says per op whether its result is kept in a checkpointed block or computed again. ``products``
   keeps all matrix products, convolutions and attentions; ``every second product`` every second of them, as torchtitan
   does.
2. ``save_on_cpu`` moves what autograd saves to the host's memory. The step of a CPU is there already.
3. Inductor compiles both graphs to kernels of its own. It puts ops into an order with a low peak if
   ``reorder_for_peak_memory`` is on, as it is by default. Its partitioner reads ``activation_memory_budget`` as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from suite.methods import Build, Method, built

__all__ = ["inductor", "saved_on_cpu", "selective"]

_ATEN = torch.ops.aten
_PRODUCTS = frozenset(
    op.default
    for op in (
        _ATEN.mm,
        _ATEN.addmm,
        _ATEN.bmm,
        _ATEN.baddbmm,
        _ATEN.convolution,
        _ATEN._scaled_dot_product_flash_attention_for_cpu,
    )
)


def selective(build: Build, *, every: int) -> Method:
    """Every block under a checkpoint that keeps the result of one product out of ``every`` (definition 1)."""
    subject = built(build)
    # A policy of its own for each run of a block: its forward and its recomputation count the same products.
    subject.enable_checkpoints(context_fn=lambda: create_selective_checkpoint_contexts(_policy(every)))
    method = Method(subject, subject.model)
    method.step()
    return method


def _policy(every: int) -> Callable[..., CheckpointPolicy]:
    """Keeps the products numbered 1, 1 + every ... as they are met, in the forward and again in the recomputation."""
    met = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in _PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        again = bool(context.is_recompute)
        met[again] += 1
        return CheckpointPolicy.MUST_SAVE if met[again] % every == 1 % every else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def saved_on_cpu(build: Build) -> Method:
    """The step within ``torch.autograd.graph.save_on_cpu`` (definition 2)."""
    subject = built(build)

    def call(**kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return subject.model(**kwargs)

    method = Method(subject, call)
    method.step()
    return method


def inductor(build: Build, *, share: float = 1.0, reorder: bool = True) -> Method:
    """``torch.compile`` with its default backend (definition 3)."""
    subject = built(build)
    method = Method(subject, torch.compile(subject.model, fullgraph=True, dynamic=False))
    with _settings(share, reorder):
        method.step()
    return method


@contextlib.contextmanager
def _settings(share: float, reorder: bool) -> Iterator[None]:
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    with (
        dynamo_config.patch(recompile_limit=64),
        functorch_config.patch(activation_memory_budget=share, enable_autograd_cache=False),
        inductor_config.patch(reorder_for_peak_memory=reorder, compile_threads=1),
    ):
        yield

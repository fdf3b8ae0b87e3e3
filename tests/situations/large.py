"""Models of 64 MiB and more, by oracles of the kernel's: ``VmHWM``, and ``RLIMIT_DATA`` under which eager dies.

1. A step may raise ``VmHWM``, counted from what the process took before there was a model, to its budget and the
   oracle's own resolution: pages, what Python and oneDNN take. Eager's steps, whose bytes the counter knows, measure
   it; :data:`RESOLUTION_BYTES` is what they have to stay below, and what ours is allowed.
2. The first step captures and plans as well. What a process takes for that is not the budget's; it is allowed
   :data:`OWN_BYTES`, after a first capture of a toy model has loaded the compiler.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from situations.oracle import counter, hwm_bytes, reset_hwm, vm_bytes
from situations.parts import Chain
from situations.registry import variants
from situations.run import Run, seed_all

RESOLUTION_BYTES = 6 * 2**20
OWN_BYTES = 48 * 2**20


class Heavy(nn.Module):
    """Two layers of 20 MiB each and a chain of activations of 8 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(512, 10240), nn.Linear(10240, 512)
        self.chain = Chain(512, 4, loss=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.chain(x)
        return self.back(F.gelu(self.wide(x[:128]))).square().mean() + x.square().mean()


MADE: dict[str, tuple[Any, tuple[int, ...]]] = {
    "chain": (lambda: Chain(384, 8), (8192, 384)),
    "heavy": (Heavy, (4096, 512)),
    "convolutions": (
        lambda: nn.Sequential(
            *[nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(5)], nn.Flatten()
        ),
        (8, 16, 96, 96),
    ),
    "dropout": (lambda: Chain(384, 6, 0.1), (8192, 384)),
}


@variants(MADE, share=0.85, seconds=600.0)
def high_water(run: Run, case: Any) -> None:
    """``VmHWM`` of every step against the budget, beside the counter."""
    make, shape = case
    if run.eager:
        _one_step(make(), run.x(99, *shape))
        seed_all()
    else:
        run.warm()
    gc.collect()
    start = vm_bytes("VmRSS") - counter().bytes
    model = make()
    run.fit(model, gradients="all")
    for i in range(3):
        model.zero_grad()
        x = run.x(i, *shape)
        gc.collect()
        reset_hwm()
        with run.step():
            loss = _one_step(model, x)
        high = hwm_bytes() - start
        run.see(f"loss {i}", loss)
        del loss, x
        gc.collect()
        if i == 0 and not run.eager:  # which captures as well: what the process took for that is not the budget's
            run.facts["taken to capture, step 0_bytes"] = max(0, high - run.peaks[-1])
        error = f"VmHWM less the counter's peak, step {i}_bytes"
        run.facts[error] = high - run.peaks[-1]
        most = run.peaks[-1] if run.eager else run.budgets[-1]
        allowed = most + (OWN_BYTES if i == 0 and not run.eager else RESOLUTION_BYTES)
        run.expect(
            f"VmHWM is {(high - most) / 2**20:.1f} MiB above the budget of {most / 2**20:.0f} at step {i}",
            high <= allowed,
        )
        start = max(start, vm_bytes("VmRSS") - counter().bytes) if i == 0 else start
    run.see_model(model)


@variants({"chain": MADE["chain"], "dropout": MADE["dropout"]}, share=0.6, seconds=600.0, calls=1)
def hard_limit(run: Run, case: Any) -> None:
    """Under one ``RLIMIT_DATA`` midway between the budget and eager's peak, eager dies and the fitted model trains."""
    make, shape = case
    if run.eager:
        model = make()
        x = run.x(0, *shape)
        with run.step():
            loss = model(x)
            loss.backward()
        run.see("loss", loss)
        del loss
        run.see_model(model)
        run.fit(model)
        dead = _trains_under(model, x, vm_bytes("VmData") + (run.peaks[-1] - _resident(model, x)) * 7 // 10)
        run.expect("eager finishes under seven tenths of what it takes", dead == errno.ENOMEM)
        return
    run.warm()
    model = make()
    run.fit(model)
    x = run.x(0, *shape)
    gc.collect()
    budget = run._budget or 0
    limit = vm_bytes("VmData") + budget - _resident(model, x) + OWN_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    try:
        with run.step():
            loss = model(x)
            loss.backward()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.see("loss", loss)
    del loss
    run.see_model(model)


def _one_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x)
    if loss.dim():
        loss = loss.square().mean()
    loss.backward()
    return loss


def _resident(model: nn.Module, x: torch.Tensor) -> int:
    return sum(p.nbytes for p in model.parameters()) + x.nbytes


def _trains_under(model: nn.Module, x: torch.Tensor, limit: int) -> int:
    """0 if a step of ``model`` finishes in a forked process under ``limit``, ``ENOMEM`` if it dies for memory."""
    model.zero_grad()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            model(x).backward()
            code = 0
        except (MemoryError, RuntimeError) as error:
            code = errno.ENOMEM if "memory" in str(error) else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

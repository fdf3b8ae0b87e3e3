"""Orders of summation, and memory that is rewritten between forward and backward."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from situations.parts import Chain
from situations.registry import Refusal, situation, variants
from situations.run import MOVING, Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


@variants({"input": 2, "three": 3}, share=1.3)
def fitted_submodules_read_one_tensor(run: Run, count: Any) -> None:
    """The gradient of a tensor that several fitted submodules read is a sum in eager's order."""
    stem = nn.Linear(64, 64)
    parts = [run.fit(Chain(depth=4, loss=False), gradients="all") for _ in range(count)]
    for i in range(4):
        for module in (stem, *parts):
            module.zero_grad()
        x = run.x(i)
        with run.step(beside=[stem, *parts[1:]], bytes_beside=x.nbytes):
            h = stem(x).tanh()
            loss = sum(part(h).square().mean() for part in parts) + h.abs().mean()
            del h
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        for k, module in enumerate((stem, *parts)):
            run.see_model(module, f"part {k} step {i}")


@situation(share=1.3)
def fitted_experts(run: Run) -> None:
    """Two fitted parts of one parent, which is not fitted; one tensor feeds both and the sum."""

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = nn.Linear(64, 64), Chain(depth=3, loss=False), Chain(depth=3, loss=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return (x + self.a(x) * self.b(x)).square().mean()

    parent = Parent()
    run.fit(parent.a)
    run.fit(parent.b)
    for i in range(4):
        parent.zero_grad()
        x = run.x(i)
        with run.step(beside=[parent.stem, parent.b], bytes_beside=x.nbytes):
            loss = parent(x)
            loss.backward()
        del loss
        run.see_model(parent, f"step {i}")


_REWRITTEN = Refusal("VerificationError", "rewritten|input|changed|verify")


@situation(share=0.45, refused=_REWRITTEN, either=True, limit="memory rewritten behind torch's back")
def numpy_view_rewritten(run: Run) -> None:
    """A prefetcher overwrites the batch between forward and backward: a limit that torch's checkpoint has as well."""
    model = run.fit(Chain())
    for i in range(4):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            x.numpy()[:] = 0.0
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


# What moves is not computed again from what is rewritten, and the step may be right.
@situation(share=0.45, refused=Refusal("VerificationError", "rewritten|input|changed"), either=MOVING in os.environ)
def numpy_view_rewritten_always_verified(run: Run) -> None:
    """``verify="always"`` says so instead."""

    class Reading(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.features(F.relu(x)).square().mean()

    model = run.fit(Reading(), verify="always")
    for i in range(5):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            if i >= 3:
                x.numpy()[:] = 0.0
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation()
def verified_always(run: Run) -> None:
    """``verify="always"`` on a loop that rewrites nothing: as any other."""
    run.train(Chain(p=0.1), lambda m, i: _loss(m, run.x(i)), verify="always")


@situation()
def input_changed_in_place(run: Run) -> None:
    """``x.zero_()`` between: eager raises where it needs the old value, and so do we."""

    class Reading(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.features(x).square().mean()

    model = run.fit(Reading())
    for i in range(3):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            caught = ""
            x.zero_()
            try:
                loss.backward()
            except RuntimeError as error:
                caught = "inplace" if "inplace operation" in str(error) else str(error)[:60]
        run.see(f"caught {i}", caught)
        del loss
        if caught:
            return


@situation(share=0.9)
def static_input_buffer(run: Run) -> None:
    """One buffer for all batches, filled between steps as CUDA graphs want it."""
    buffer = torch.empty(1024, 64)

    def step(model: Any, i: int) -> Any:
        buffer.copy_(run.x(i))
        return _loss(model, buffer)

    run.train(Chain(), step)


@situation(share=0.9)
def parameter_changed_between(run: Run) -> None:
    """``optimizer.step()`` between a forward and its backward: eager raises, and so do we."""
    model = run.fit(Chain())
    for i in range(3):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
            caught = ""
            try:
                loss.backward()
            except RuntimeError as error:
                caught = "inplace" if "inplace operation" in str(error) else str(error)[:60]
        run.see(f"caught {i}", caught)
        del loss

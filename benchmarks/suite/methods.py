"""The ways to run a model's step: eager, Ebbtide at two budgets, and what PyTorch offers to the same end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import ebbtide
from ebbtide import Case, Plan
from harness.grid import captured
from harness.min_cut import budget_of, min_cut_compiled
from suite.subject import SEED, Subject, loss_of

__all__ = ["Fitted", "Method", "checkpointed", "eager", "fitted", "memory_budget"]

Build = Callable[[], Subject]


@dataclass(frozen=True)
class Method:
    """A model of its own, from the same seed as every other method's, and what is called.

    Attributes:
        subject: the model whose gradients and buffers are read, and its inputs.
        call: the model or its compiled form.
    """

    subject: Subject
    call: Callable[..., Any]

    def step(self) -> torch.Tensor:
        """Forward and backward; the loss. All that the model gave is kept until the end, as by who logs it."""
        outputs = self.call(**self.subject.kwargs)
        loss = loss_of(outputs)
        loss.backward()
        return loss.detach().clone()


@dataclass(frozen=True)
class Fitted:
    """A method of ours.

    Attributes:
        label: the budget, as a share of the way from smallest to unplanned.
        plan: that runs.
        above_bytes: the budget above the step's start.
    """

    label: str
    plan: Plan
    above_bytes: int
    method: Method


def built(build: Build) -> Subject:
    """The model and its inputs, the same at every call."""
    torch.manual_seed(SEED)
    subject = build()
    subject.buffers  # noqa: B018 (copied before any step)
    return subject


def eager(build: Build) -> Method:
    """The step as PyTorch runs it."""
    subject = built(build)
    return Method(subject, subject.model)


def fitted(build: Build, shares: Sequence[float]) -> list[Fitted]:
    """Captured once for all plans and once per fitted model, as by its users; the first two steps are proven.

    Raises:
        EbbtideError: if the model is refused.
    """
    subject = built(build)
    known = captured(Case(subject.model, kwargs=subject.kwargs))
    found: list[Fitted] = []
    for share in shares:
        above = known.grid_bytes(share)
        plan = known.plan(above)
        own = built(build)
        method = Method(own, ebbtide.fit(own.model, plan, progress=None))
        for _ in range(2):
            method.step()
            own.model.zero_grad()
        found.append(Fitted(f"{share:.0%}", plan, above, method))
    return found


def checkpointed(build: Build) -> Method:
    """``torch.utils.checkpoint`` around every block: the library's own switch where it has one."""
    subject = built(build)
    subject.enable_checkpoints()
    method = Method(subject, subject.model)
    method.step()
    return method


def memory_budget(build: Build, share: float) -> Method:
    """``torch.compile`` with the min-cut partitioner under ``activation_memory_budget=share``; ATen as captured.

    The partitioner reads its budget at the first call, which is made here. No compiler is needed.
    """
    subject = built(build)
    method = Method(subject, min_cut_compiled(subject.model))
    with budget_of(share):
        method.step()
    return method

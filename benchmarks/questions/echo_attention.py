"""Attention in a loop over its queries, in chunks of them, and of all at once: what a plan can do for each form.

1. The additive score keeps ``batch x queries x places x size`` for the backward. In a loop each query's part is made
   again alone, for an add and a tanh; all at once, the tensor made again is as large as the one that was dropped, so
   that the least peak has it (and its gradient), whatever the plan. Chunks are between.
2. The multiplicative score keeps the weights, ``batch x heads x queries x places``; written out, all at once, and as
   the fused operator, which keeps no tensor of pairs.
3. *Floor*: no plan with first runs and boundary as captured has a lower peak; beside it the op that pins it. *Least* is
   the lowest peak that a plan was found for; *half* is the plan at the middle between least and unplanned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide import Case, Program
from ebbtide.planners.search.smallest import smallest_schedule
from ebbtide.step.machine import machine_named
from ebbtide.step.schedule import Compute, Schedule
from ebbtide.zoo.inputs import noise
from harness.footprint import MB, Footprint
from harness.record import Row, at_most, holds

TITLE = "Attention looped, in chunks, and at once; titanxp-12gb by roofline"
MACHINE = "titanxp-12gb"
SHARE = 0.5
PRODUCTS = ("mm.default", "addmm.default", "bmm.default", "baddbmm.default")
LEAST_OF_ONCE = 0.25  # of the floor of all queries at once, that the looped form stays below


@dataclass(frozen=True)
class _Sizes:
    batch: int = 32
    length: int = 100
    width: int = 512
    heads: int = 8


class _Additive(nn.Module):
    """Scores of ``chunk`` queries at a time."""

    def __init__(self, width: int, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, queries: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        keys = self.key(memory).unsqueeze(1)
        read: list[torch.Tensor] = []
        for part in self.query(queries).split(self.chunk, 1):
            weights = self.score(torch.tanh(part.unsqueeze(2) + keys)).squeeze(-1).softmax(-1)
            read.append(weights @ memory)
        return torch.cat(read, 1).square().mean()


class _Multiplicative(nn.Module):
    """Heads of softmax(Q K') V, written out or as one operator."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, queries: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(of).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, of in ((self.query, queries), (self.key, memory), (self.value, memory))
        )
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v).square().mean()
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return (scores.softmax(-1) @ v).square().mean()


MODELS: dict[str, Callable[[_Sizes], nn.Module]] = {
    "additive, looped": lambda s: _Additive(s.width, 1),
    "additive, chunks of 10": lambda s: _Additive(s.width, 10),
    "additive, at once": lambda s: _Additive(s.width, s.length),
    "softmax(QK')V, written out": lambda s: _Multiplicative(s.width, s.heads, fused=False),
    "softmax(QK')V, fused": lambda s: _Multiplicative(s.width, s.heads, fused=True),
}
CASES = ("forms",)
QUICK = CASES


def rows(case: str, quick: bool) -> Iterator[Row]:
    sizes = _Sizes(batch=8, length=20, width=64) if quick else _Sizes()
    floors: dict[str, int] = {}
    for name, make in MODELS.items():
        step = Footprint(lambda make=make: _case(make(sizes), sizes), machine_named(MACHINE))
        floors[name] = step.floor()[0]
        row = _row(name, step, floors)
        yield Row(row.question, row.columns) if quick else row


def _case(model: nn.Module, sizes: _Sizes) -> Case:
    shape = (sizes.batch, sizes.length, sizes.width)
    return Case(model, (noise(*shape).requires_grad_(), noise(*shape, seed=4).requires_grad_()))


def _row(name: str, step: Footprint, floors: dict[str, int]) -> Row:
    resident = step.step.resident_bytes
    least = resident + smallest_schedule(step.program)[0]
    budget = int(least + SHARE * (step.unplanned_bytes - least))
    half = step.plan(budget)
    again = _again(step.program, half.answer.schedule)
    columns = {
        "case": name,
        "ops": len(step.program.ops),
        "unplanned_mb": step.unplanned_bytes / MB,
        "resident_mb": resident / MB,
        "floor_mb": floors[name] / MB,
        "floor_at": step.floor()[1],
        "least_mb": least / MB,
        "half_mb": budget / MB,
        "half_overhead_percent": None if half.overhead is None else 100 * half.overhead,
        "half_bound_percent": None if half.answer.bound is None else 100 * half.answer.bound,
        "runs_again": ", ".join(f"{n} {target}" for target, n in again.most_common(4)),
    }
    checks = [holds("a plan at half", half.overhead is not None)]
    if name == "additive, looped":
        columns["products_again"] = sum(again[target] for target in PRODUCTS)
        checks.append(holds("no product runs again at half", not columns["products_again"]))
    if name == "additive, at once":
        share = floors["additive, looped"] / floors[name]
        checks.append(at_most("the looped form's floor, of this one's", share, LEAST_OF_ONCE))
    return Row("attention", columns, tuple(checks))


def _again(program: Program, schedule: Schedule | None) -> Counter[str]:
    """How often ops of a target run once more."""
    runs = Counter(each.op for each in (schedule.actions if schedule else ()) if isinstance(each, Compute))
    counts = Counter[str]()
    for op, times in runs.items():
        if times > 1:
            counts[program.ops[op].target.removeprefix("aten.")] += times - 1
    return counts

"""What a fitted model must keep to on any device, written once: for ``tests/engine`` on CPU, ``tests/gpu`` on a card.

Each scenario trains an eager copy and a fitted one from the same state and returns what was found; the tests judge.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

import ebbtide
from ebbtide.zoo import GPTConfig, gpt, mlp_chain

__all__ = ["MODELS", "Found", "Way", "case_of", "compared", "deterministic", "train", "workable"]

EFFORT = 500
STEPS = 4


class Images(nn.Module):
    """Convolutions with batch norm, whose running statistics change in every step, and dropout."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        modules: list[nn.Module] = []
        for before in (3, *[width] * (layers - 1)):
            modules += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.1)]
        self.layers, self.head = nn.Sequential(*modules), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(images).mean((2, 3)))
        return F.cross_entropy(scores, torch.zeros(len(images), dtype=torch.int64, device=images.device))


def _chain(large: bool) -> ebbtide.Case:
    return mlp_chain(8192, layers=12, width=512, dropout=0.1) if large else mlp_chain(256, layers=5, width=32)


def _gpt(large: bool) -> ebbtide.Case:
    sizes = (512, 256, 6, 512, 8) if large else (64, 32, 1, 32, 2)
    names = ("vocabulary", "length", "layers", "width", "heads")
    return gpt(8 if large else 4, GPTConfig(**dict(zip(names, sizes, strict=True)), dropout=0.1))


def _images(large: bool) -> ebbtide.Case:
    return ebbtide.Case(Images(64, 8) if large else Images(8, 4), (torch.randn(16, 3, 64 if large else 16, 64),))


MODELS: dict[str, Callable[[bool], ebbtide.Case]] = {"chain": _chain, "gpt": _gpt, "images": _images}


def case_of(name: str, device: str, *, large: bool) -> ebbtide.Case:
    """A model on ``device``, the same at every call; large ones fill kernels, small ones suit the CPU."""
    torch.manual_seed(1)
    case = MODELS[name](large)
    return ebbtide.Case(case.model.to(device).train(), tuple(a.to(device) for a in case.args), name=name)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits twice."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Way:
    """How the steps are taken.

    Attributes:
        autocast: its dtype, if the forward runs under it.
        scaler: whether losses are scaled and gradients unscaled, as float16 needs.
        around: entered around every step: a stream, another current device.
    """

    autocast: torch.dtype | None = None
    scaler: bool = False
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


@dataclass
class Found:
    """What training gave: losses and the state after it, and on CUDA the peak of every step, the first included."""

    tensors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    peaks: list[int] = field(default_factory=list[int])

    def same_as(self, other: Found) -> bool:
        return len(self.tensors) == len(other.tensors) and all(
            torch.equal(a, b) for a, b in zip(self.tensors, other.tensors, strict=True)
        )


def train(case: ebbtide.Case, way: Way, steps: int = STEPS) -> Found:
    """Steps of plain SGD, whose state takes no bytes, each from no gradients and with its own dropout."""
    found, model = Found(), case.model
    device = case.args[0].device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device.type, enabled=way.scaler, init_scale=2.0**10)
    torch.manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        with way.around():
            narrow = torch.autocast(device.type, way.autocast) if way.autocast else contextlib.nullcontext()
            with narrow:
                loss = model(*case.args)
            scaler.scale(loss).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            found.peaks.append(torch.cuda.max_memory_allocated(device))
        scaler.step(optimizer)
        scaler.update()
        found.tensors.append(loss.detach().float().cpu())
    found.tensors += [each.detach().cpu() for each in model.state_dict().values()]
    found.tensors += [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    return found


def workable(case: ebbtide.Case, way: Way, share: float) -> int:
    """A budget at ``share`` of the way from the smallest to the unplanned peak, everything that is alive counted."""
    copied = copy.deepcopy(case.model)
    narrow = torch.autocast(case.args[0].device.type, way.autocast) if way.autocast else contextlib.nullcontext()
    with way.around(), narrow:
        plan = ebbtide.plan(copied, case.args, budget="1000%", options=ebbtide.Options(effort=EFFORT))
    del copied
    smallest = plan.smallest_bytes - plan.resident_bytes - plan.reserve_bytes
    above = int(smallest + share * (plan.baseline.above_bytes - smallest))
    resident = plan.resident_bytes
    if case.args[0].is_cuda:
        resident = torch.cuda.memory_allocated(case.args[0].device)
    return resident + plan.reserve_bytes + above


def compared(case: ebbtide.Case, way: Way, share: float = 0.4) -> tuple[Found, Found, int]:
    """What an eager copy and the fitted model gave, and the budget that the latter had.

    The eager copy is gone before the fitted model starts, so that a peak is the latter's alone.
    """
    plain = ebbtide.Case(copy.deepcopy(case.model), case.args)
    eager = train(plain, way)
    del plain
    budget = workable(case, way, share)
    ebbtide.fit(case.model, budget, options=ebbtide.Options(effort=EFFORT))
    return eager, train(case, way), budget

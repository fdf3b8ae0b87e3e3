"""What an optimizer's step takes is foreseen for every step that it takes, to the kernels' own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from ebbtide.measurement.cpu_allocations import AllocationRecorder, peak_above
from ebbtide.optimizer.cost import step_bytes as step_bytes_module
from ebbtide.optimizer.cost.step_bytes import step_bytes

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
STEPS = 12
SCALARS = 2048  # of all parameters' counters and rates


class Preconditioned(torch.optim.Optimizer):
    """Shampoo's way: at every step whose number leaves the remainder, a decomposition of the gradient's products."""

    def __init__(
        self, parameters: list[nn.Parameter], every: int = 2, remainder: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(parameters, {"every": every, "remainder": remainder, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state.update(count=0, factor=torch.ones_like(each))
                state["count"] += 1
                if each.ndim == 2 and state["count"] % group["every"] == group["remainder"]:
                    gradient = each.grad.to(group["dtype"])
                    products = (gradient @ gradient.T).float() + torch.eye(len(gradient), device=each.device)
                    values, vectors = torch.linalg.eigh(products)
                    state["factor"].copy_(vectors @ (values.rsqrt()[:, None] * each.grad))
                each.add_(state["factor"], alpha=-0.1)


KINDS: dict[str, Make] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "RAdam, heavier from its sixth step on": lambda p: torch.optim.RAdam(p),
    "ASGD, which averages later": lambda p: torch.optim.ASGD(p, t0=3),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Muon, with its products of 16 bits": lambda p: torch.optim.Muon(p),
    "the first step alone": lambda p: Preconditioned(p, 10**6, 1),
    "every fourth step": lambda p: Preconditioned(p, 4),
    "every tenth step, products of 16 bits": lambda p: Preconditioned(p, 10, dtype=torch.bfloat16),
}


def _peaks(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> Iterator[int]:
    """What each real step takes above parameters, gradients and the state that it leaves."""
    for step in range(STEPS):
        for each in parameters:
            each.grad = torch.randn_like(each)
        recorder = AllocationRecorder()
        recorder.start()
        optimizer.step()
        events = recorder.stop()
        yield peak_above(events) - (sum(event.bytes for event in events) if step == 0 else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_the_largest_of_the_real_steps_takes(kind: str) -> None:
    shapes = [(192, 192), (192,), (192, 96), (96,), (64, 192)]
    if kind.startswith("Muon"):  # which takes matrices alone
        shapes = [(192, 96)] * 3
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    foreseen = step_bytes(KINDS[kind](parameters))
    measured = max(_peaks(KINDS[kind](parameters), parameters))
    assert foreseen is not None
    assert measured <= foreseen + SCALARS
    assert foreseen <= measured + SCALARS


def test_where_the_step_is_to_run_elsewhere_no_kernel_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.optimizer.cost.step_bytes.workspace_alone", lambda *_: pytest.fail("a kernel was run"))
    parameters = [nn.Parameter(torch.empty(64, 64, device="meta"))]
    assert step_bytes(torch.optim.AdamW(parameters), "cuda") is not None
    assert step_bytes(Preconditioned(parameters)) is not None


TORCHS = [
    kind
    for name in torch.optim.__all__
    if isinstance(kind := getattr(torch.optim, name), type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind.__name__ not in {"Optimizer", "LBFGS", "SparseAdam"}  # which want a closure, or sparse gradients
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", TORCHS, ids=lambda kind: kind.__name__)
def test_few_steps_tell_the_largest_of_torchs_own(
    kind: type[torch.optim.Optimizer], foreach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = [
        nn.Parameter(torch.randn(24, 16)),
        *([] if kind is torch.optim.Muon else [nn.Parameter(torch.ones(9))]),
    ]
    options = {} if kind is torch.optim.Muon else {"foreach": foreach}
    few = step_bytes(kind(parameters, lr=0.1, **options))
    monkeypatch.setattr(step_bytes_module, "TORCHS_STEPS", 32)
    assert few == step_bytes(kind(parameters, lr=0.1, **options))

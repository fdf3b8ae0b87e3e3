"""The optimizer in the step: the bits of a loop whose optimizer steps outside, over twenty steps, and less memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ebbtide
from ebbtide.measurement.cpu_allocations import AllocationRecorder, peak_above
from ebbtide.measurement.resident import resident_bytes
from ebbtide.optimizer.in_step.updates import PREFIX
from ebbtide.step.legality import check
from sampled import sampled

STEPS = 20
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


class Mlp(nn.Module):
    """Dropout, batch norm, a frozen layer, and a layer that is used twice."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(8, width, dtype=dtype)
        self.frozen = nn.Linear(width, width, dtype=dtype).requires_grad_(False)
        self.shared = nn.Linear(width, width, dtype=dtype)
        self.norm = nn.BatchNorm1d(width, dtype=dtype)
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(width, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(F.relu(self.frozen(F.gelu(self.first(x))))))
        return self.last(self.shared(torch.tanh(self.shared(x)))).float().square().mean()


class Tied(nn.Module):
    """A language model of one layer whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layer(self.words(tokens[:, :-1])) * self.scale
        return F.cross_entropy((hidden @ self.words.weight.t()).flatten(0, 1), tokens[:, 1:].flatten())


class Lora(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down = nn.Linear(16, 2, bias=False)
        self.up = nn.Linear(2, 16, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + self.up(self.down(x))).tanh().square().mean()


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(*shape).to(dtype),)


def tokens() -> tuple[Tensor]:
    return (torch.randint(40, (4, 9)),)


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    arguments: Callable[[], tuple[Any, ...]],
    steps: int = STEPS,
    norm: Callable[[], Tensor | None] | None = None,
) -> list[Any]:
    """Losses, weights, buffers, the optimizer's state and random state after some steps of a plain loop.

    ``norm`` clips, or gives the norm of what has been clipped; norms are among what is found then.
    """
    torch.manual_seed(3)
    seen: list[Any] = []
    for _ in range(steps):
        loss = model(*arguments())
        optimizer.zero_grad()
        loss.backward()
        if norm is not None:
            total = norm()
            assert total is not None
            seen.append(total.clone())
        optimizer.step()
        seen.append(loss.detach().clone())
    return [*seen, *outcome(model, optimizer), torch.get_rng_state()]


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    yield from model.state_dict().values()
    state = optimizer.state_dict()["state"]
    for key in sorted(state):
        yield from (state[key][name] for name in sorted(state[key]))


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert bits(mine) == bits(theirs) if isinstance(theirs, Tensor) else mine == theirs


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def fitted(model: nn.Module, of: OptimizerOf, budget: str | int = "100%", **options: Any) -> torch.optim.Optimizer:
    optimizer = of(model)
    ebbtide.fit(model, budget, optimizer=optimizer, step="inside", progress=None, options=ebbtide.Options(**options))
    return optimizer


def assert_as_outside(
    make: Callable[[], nn.Module],
    of: OptimizerOf,
    arguments: Callable[[], tuple[Any, ...]],
    budget: str | int = "100%",
    steps: int = STEPS,
    clipping: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """A fitted model trains as a copy of it in eager, whose gradients are clipped as ``clipping`` says."""
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    norms: list[Callable[[], Tensor | None] | None] = [None, None]
    if clipping is not None:
        norms = [lambda: nn.utils.clip_grad_norm_(plain.parameters(), **clipping), lambda: ebbtide.total_norm(model)]
        options["max_norm"] = clipping["max_norm"]
    expected = trained(plain, of(plain), arguments, steps, norms[0])
    optimizer = fitted(model, of, budget, **options)
    assert_same(trained(model, optimizer, arguments, steps, norms[1]), expected)
    assert ebbtide.plan_of(model).program.gradients == ()  # type: ignore[union-attr]
    assert ebbtide.calls_of(model).planned == steps
    assert not ebbtide.calls_of(model).unplanned
    return model


def updates_of(model: nn.Module) -> int:
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert not check(plan.program, plan.schedule)
    return sum(op.target.startswith(PREFIX) for op in plan.program.ops)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"amsgrad": True},
    "AdamW": {"maximize": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "Adagrad": {},
    "ASGD": {},
    "RMSprop": {"centered": True},
    "Rprop": {},
    "Adafactor": {},
}
WAYS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
EVERY = [
    (name, way)
    for name in OPTIMIZERS
    for way in WAYS
    if way != "fused" or name in FUSED  # others have no fused form on a CPU
]
SEEN = [
    each
    for each in EVERY
    if each in (("AdamW", "plain"), ("Adafactor", "plain"), ("AdamW", "fused"))
    or (each[1] == "foreach" and each[0] not in ("Adam", "NAdam", "RAdam", "Adamax"))
]
"""What every change sees: the loop over parameters of some, and all at once of those that are no kin of AdamW."""


@pytest.mark.parametrize(("name", "way"), sampled(EVERY, *SEEN))
def test_every_optimizer_steps_in_the_backward_as_it_does_after_it(name: str, way: str) -> None:
    def of(model: nn.Module) -> torch.optim.Optimizer:
        settings: dict[str, Any] = {**OPTIMIZERS[name], **WAYS[way]}
        return getattr(torch.optim, name)(model.parameters(), lr=0.01, **settings)

    model = assert_as_outside(Mlp, of, floats(16, 8))
    assert updates_of(model) == sum(each.requires_grad for each in model.parameters())


def test_muon_steps_on_each_matrix_for_itself() -> None:
    def of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([each for each in model.parameters() if each.ndim == 2], lr=0.01)

    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(model)

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).square().mean()

    assert updates_of(assert_as_outside(Loss, of, floats(16, 8), steps=5)) == 2


def sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, **settings)


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **settings)


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim < 2]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.03}], lr=0.01)


@pytest.mark.parametrize(
    ("make", "of", "arguments"),
    [
        (Tied, adamw, tokens),
        (Tied, functools.partial(sgd, momentum=0.9), tokens),
        (Lora, adamw, floats(12, 16)),
        (Mlp, in_groups, floats(16, 8)),
        (functools.partial(Mlp, torch.bfloat16), adamw, floats(16, 8, dtype=torch.bfloat16)),
        (functools.partial(Mlp, torch.bfloat16), sgd, floats(16, 8, dtype=torch.bfloat16)),
    ],
    ids=["tied, adamw", "tied, momentum", "lora", "groups", "bf16, adamw", "bf16, sgd"],
)
@pytest.mark.parametrize("budget", ["100%", "smallest"])
def test_models_train_as_with_the_optimizer_outside(
    make: Callable[[], nn.Module], of: OptimizerOf, arguments: Callable[[], tuple[Any, ...]], budget: str
) -> None:
    within: str | int = budget
    if budget == "smallest":
        within = int(
            1.01
            * ebbtide.plan(
                make(), arguments(), budget="100%", options=ebbtide.Options(optimizer=of, step="inside")
            ).smallest_bytes
        )
    model = assert_as_outside(make, of, arguments, within)
    assert updates_of(model) > 0


def test_some_of_the_parameters_belong_to_another_optimizer() -> None:
    """What the fitted optimizer does not have gets its gradients as ever."""

    def run(model: Mlp, fit: bool) -> list[Any]:
        mine = torch.optim.AdamW([*model.first.parameters(), *model.shared.parameters()], lr=0.01)
        other = torch.optim.SGD(model.last.parameters(), lr=0.1)
        if fit:
            ebbtide.fit(model, "100%", optimizer=mine, step="inside", progress=None)
        torch.manual_seed(3)
        for _ in range(5):
            loss = model(torch.randn(16, 8))
            loss.backward()
            assert model.last.weight.grad is not None
            for each in (mine, other):
                each.step()
            model.zero_grad()
        return [*outcome(model, mine), *outcome(model, other)]

    torch.manual_seed(0)
    model = Mlp()
    assert_same(run(copy.deepcopy(model), True), run(model, False))


class Deep(nn.Module):
    """Weights outweigh activations, so that gradients do too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.GELU()) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("of", [sgd, adamw, functools.partial(adamw, foreach=True)])
def test_gradients_are_not_resident_at_any_time(of: OptimizerOf) -> None:
    """The allocator's own count of a whole step, ``optimizer.step()`` in it, from the second step on."""
    peaks: dict[str, int] = {}
    for step in ("outside", "inside"):
        torch.manual_seed(0)
        model, x = Deep(), torch.randn(8, 96)
        optimizer = of(model)
        ebbtide.fit(model, "100%", optimizer=optimizer, step=step, progress=None)  # type: ignore[arg-type]
        for number in range(4):
            start = resident_bytes([model, optimizer, x])
            recorder = AllocationRecorder()
            if number == 3:
                recorder.start()
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 3:
                peaks[step] = start + peak_above(recorder.stop())
                plan = ebbtide.plan_of(model)
                assert plan is not None
                assert step == "outside" or peaks[step] <= plan.predicted_peak_bytes + 4096
    weights = sum(each.nbytes for each in Deep().parameters())
    assert peaks["inside"] < peaks["outside"] - 0.7 * weights


def test_the_first_step_stays_within_the_budget_too() -> None:
    """Its rehearsal and its updates, with all that the optimizer makes."""
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(256, 96)
    smallest = ebbtide.plan(
        model, (x,), budget="100%", options=ebbtide.Options(optimizer=adamw, step="inside", progress=None)
    ).smallest_bytes
    optimizer = fitted(model, adamw, int(1.05 * smallest))
    model(x)  # captured and planned, and rehearsed; its graph goes
    start = resident_bytes([model, optimizer, x])
    recorder = AllocationRecorder()
    recorder.start()
    model(x).backward()
    optimizer.step()
    assert start + peak_above(recorder.stop()) <= int(1.05 * smallest)
    assert ebbtide.step_of(model).verified_buffers > 0  # type: ignore[union-attr]

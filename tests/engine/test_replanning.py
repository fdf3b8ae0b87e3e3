"""Plans are replaced without a new capture, and whoever looks at saved tensors sees nothing of it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import pickle
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.engine import compiled
from ebbtide.engine.first_runs import Phase
from ebbtide.engine.fitted_class import FITTED
from ebbtide.errors import BudgetError, UsageError

ROWS, WIDTH = 128, 32


class Tower(nn.Module):
    """Dropout, batch norm, a counter and views; returns the loss."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1.0)
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return self.norm(x).t().square().mean()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every function that is given to torch.compile."""
    made: list[object] = []
    honest = compiled.compile_step

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return honest(*args, **kwargs)

    monkeypatch.setattr(compiled, "compile_step", counting)
    return made


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def twins(budget: str | int = "100%", model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    plain = model or Tower()
    return ebbtide.fit(copy.deepcopy(plain), budget, options=ebbtide.Options(effort=500, **options)), plain


@functools.cache
def smallest() -> int:
    """Of a tower."""
    return ebbtide.plan(Tower(), (rows(),), budget="1000%", options=ebbtide.Options(effort=100)).smallest_bytes


def assert_same(pair: tuple[nn.Module, nn.Module]) -> None:
    ours, theirs = pair
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(a, b)


def backward(model: nn.Module, seed: int, **kwargs: Any) -> None:
    torch.manual_seed(seed)
    model(rows(seed)).backward(**kwargs)


def phase(model: nn.Module) -> Phase:
    step = ebbtide.step_of(model)
    assert step is not None
    return step.phase


def test_gradient_accumulation_over_eight_steps_takes_one_capture(captures: list[object]) -> None:
    model = Tower()
    gradients = sum(p.nbytes for p in model.parameters())
    pair = twins(smallest() + gradients + 40_000, model)
    plans: set[int] = set()
    for seed in range(8):
        for each in pair:
            backward(each, seed)
        assert_same(pair)
        plan = ebbtide.plan_of(pair[0])
        assert plan is not None
        plans.add(plan.resident_bytes)
        assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert len(captures) == 1
    assert len(plans) <= 2, "one without gradients and, where that has no room for them, one with them"


def test_a_budget_that_leaves_no_room_for_gradients_is_planned_anew_for_the_same_capture(
    captures: list[object],
) -> None:
    model = Tower()
    gradients = sum(p.nbytes for p in model.parameters())
    pair = twins(smallest() + gradients + 8_000, model)
    overheads: list[float] = []
    for seed in range(3):
        for each in pair:
            backward(each, seed)
        assert_same(pair)
        plan = ebbtide.plan_of(pair[0])
        assert plan is not None
        overheads.append(plan.overhead)
    assert overheads[1] > overheads[0], "nothing was planned anew"
    for each in pair:
        each.zero_grad()
        backward(each, 9)
    assert_same(pair)
    plan = ebbtide.plan_of(pair[0])
    assert plan is not None
    assert plan.overhead == overheads[0], "the first plan holds again and takes less"
    assert len(captures) == 1


def test_toggling_requires_grad_twenty_times_takes_two_captures(captures: list[object]) -> None:
    pair = twins("1GiB")
    for seed in range(20):
        for each in pair:
            each.zero_grad()
            for parameter in each.layers[:3].parameters():  # type: ignore[union-attr, index]
                parameter.requires_grad_(seed % 2 == 0)
            backward(each, seed)
        assert_same(pair)
    assert len(captures) == 2


def test_an_attribute_that_goes_back_finds_its_capture_again(captures: list[object]) -> None:
    pair = twins("1GiB")
    for seed, probability in enumerate((0.1, 0.3, 0.1, 0.3, 0.1)):
        for each in pair:
            each.drop.p = probability  # type: ignore[union-attr]
            backward(each, seed)
        assert_same(pair)
    assert len(captures) == 2


def test_one_argument_twice_is_another_step_than_two_arguments(captures: list[object]) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * torch.tanh(self.linear(y))).square().mean()

    pair = twins("1GiB", Sum())
    x, y = rows(1), rows(2)
    for _ in range(3):
        for arguments in ((x, x), (x, y)):
            for each in pair:
                each(*arguments).backward()
            assert_same(pair)
    assert len(captures) == 2


def test_a_learned_loss_outside_needs_no_new_capture(captures: list[object]) -> None:
    body = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)), nn.Linear(WIDTH, 256))
    pair = twins("150%", body)
    for seed in range(3):
        for each in pair:
            nn.functional.cross_entropy(each(rows(seed)), torch.arange(ROWS)).backward()
        assert_same(pair)
    plan = ebbtide.plan_of(pair[0])
    assert plan is not None
    assert plan.program.between_bytes > 0
    assert len(captures) == 1


def test_optimizer_state_needs_no_new_capture(captures: list[object]) -> None:
    pair = twins("100%")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in pair]
    for seed in range(4):
        for each, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            backward(each, seed)
            optimizer.step()
        for p, q in zip(*(each.parameters() for each in pair), strict=True):
            assert torch.equal(p, q)
    assert len(captures) == 1


def test_set_budget_plans_for_the_capture_that_there_is(captures: list[object]) -> None:
    pair = twins("1GiB")
    least = smallest() + sum(p.nbytes for p in pair[1].parameters()) + 8_000
    seen: list[float] = []
    for seed, budget in enumerate(("1GiB", least, "1GiB")):
        ebbtide.set_budget(pair[0], budget)
        for each in pair:
            each.zero_grad()
            backward(each, seed)
        assert_same(pair)
        plan = ebbtide.plan_of(pair[0])
        assert plan is not None
        seen.append(plan.overhead)
    assert seen[0] == seen[2] == 0 < seen[1]
    assert len(captures) == 1
    with pytest.raises(UsageError, match="not fitted"):
        ebbtide.set_budget(pair[1], "1GiB")


def test_a_refused_budget_keeps_the_capture_and_shows_our_frames_last(captures: list[object]) -> None:
    backward(twins("1GiB")[0], 0)  # or the refused call has no room to time ops, and the next one captures with more
    captures.clear()
    pair = twins(1000)
    with pytest.raises(BudgetError) as caught:
        backward(pair[0], 0)
    frames = [str(entry.path) for entry in caught.traceback]
    ours = [path for path in frames if "ebbtide" in path and "site-packages" not in path]
    assert len([path for path in frames if "/torch/" in path]) <= 2, frames  # nn.Module's call of forward
    assert frames[-1] in ours
    assert pair[0].calls.item() == 0.0  # type: ignore[operator]
    ebbtide.set_budget(pair[0], "1GiB")
    for each in pair:
        backward(each, 0)
    assert_same(pair)
    assert len(captures) == 1


def test_phases_come_in_order() -> None:
    model, _ = twins("70%")
    loss = model(rows())
    assert phase(model) is Phase.PROVING
    loss.backward()
    assert phase(model) is Phase.MEASURING
    model.zero_grad()
    backward(model, 1)
    assert phase(model) is Phase.STEADY
    unverified, _ = twins("70%", verify=False)
    backward(unverified, 0)
    assert phase(unverified) is Phase.STEADY


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
def test_a_plan_may_be_replaced_between_a_forward_and_its_backwards(captures: list[object]) -> None:
    pair = twins("1GiB")
    least = smallest() + 400_000
    for each in pair:
        torch.manual_seed(3)
        first = each(rows(1))
        if each is pair[0]:
            ebbtide.set_budget(each, least)
        second = each(rows(2))
        first.backward(retain_graph=True)
        second.backward()
        first.backward(retain_graph=True)
        first.backward()
    assert_same(pair)
    assert len(captures) == 1


def test_a_parameter_changed_before_the_backward_raises_as_in_eager() -> None:
    for model in twins("1GiB"):
        loss = model(rows())
        with torch.no_grad():
            model.layers[2].weight.mul_(2.0)  # type: ignore[union-attr, index]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_saved_tensor_hooks_see_what_is_saved_and_may_replace_it() -> None:
    pair = twins("70%")
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor.clone()

    for each in pair:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            torch.manual_seed(1)
            loss = each(rows(1))
        loss.backward()
    assert_same(pair)
    assert sum(sizes) > 0
    for each in pair:
        with save_on_cpu():
            torch.manual_seed(2)
            losses = [each(rows(2)), each(rows(3))]
        for loss in losses:
            loss.backward()
    assert_same(pair)


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_fitted_model_inside_a_checkpoint(segments: int, reentrant: bool) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Tanh()
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    pair = twins("130%", Part())
    for seed in range(4):
        for each in pair:
            each.zero_grad()
            torch.manual_seed(seed)
            x = rows(seed).requires_grad_()
            for _ in range(segments):
                x = checkpoint(each, x, use_reentrant=reentrant)
            x.square().mean().backward()
        assert_same(pair)


def test_a_graph_dropped_without_backward_leaves_no_bytes() -> None:
    model, _ = twins("70%")
    for seed in range(3):
        backward(model, seed)
    fitted = FITTED[model]
    loss = model(rows(5))
    assert fitted.pending.by_number
    del loss
    assert not fitted.pending.by_number
    with ebbtide.measure(model, rows()) as gauge:
        loss = model(rows(6))
        del loss
        kept = torch.empty(10)
    assert gauge.above_bytes > 40
    del kept


@pytest.mark.parametrize("count", [2, 4])
def test_no_training_is_refused_for_forwards_that_never_had_a_backward(count: int, captures: list[object]) -> None:
    """An evaluation that forgot ``no_grad``, after which each step has the room that it had before."""
    budget = int(1.15 * smallest())
    pair = twins(budget)
    ours = pair[0]

    def train() -> None:
        for seed in range(2):
            for each in pair:
                backward(each, seed)
            assert_same(pair)
            for each in pair:
                each.zero_grad()

    train()
    x = rows(7)
    for each in pair:
        torch.manual_seed(7)
        with pytest.warns(UserWarning, match="another forward") if each is ours else nullcontext():
            losses = [each(x) for _ in range(count)]
        del losses
    with pytest.warns(UserWarning, match="in flight together without a backward, for which this budget has no room"):
        train()
    plan = ebbtide.plan_of(ours)
    assert plan.predicted_peak_bytes <= budget
    assert plan.program.between_bytes == 0
    train()
    assert len(captures) == 1


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
@pytest.mark.parametrize("both", [True, False])
def test_forwards_that_train_together_are_planned_for_or_refused(both: bool) -> None:
    """Also where only one of them has a backward, while the other is in the air."""
    model, _ = twins(int(1.15 * smallest()))
    first, second = model(rows(0)), model(rows(1))
    (first + second if both else second).backward()
    del first, second
    model.zero_grad()
    with pytest.raises(BudgetError):
        model(rows(2))


def test_copies_and_pickles_are_plain_models_that_can_be_fitted(captures: list[object]) -> None:
    model, plain = twins("1GiB")
    backward(model, 0)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(UsageError, match="a copy of a fitted model"):
            ebbtide.plan_of(copied)
        assert type(copied) is Tower
        copied.zero_grad()
        ebbtide.fit(copied, "1GiB")
        backward(copied, 1)
    for each in (model, plain):
        each.zero_grad()
    assert len(captures) == 3


def test_what_is_known_of_a_model_goes_with_it() -> None:
    model, _ = twins("70%")
    for seed in range(3):
        backward(model, seed)
    step = weakref.ref(ebbtide.step_of(model))  # type: ignore[arg-type]
    known = weakref.ref(step().executable)  # type: ignore[union-attr]
    ebbtide.unfit(model)
    gc.collect()
    assert step() is None
    assert known() is None


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
def test_a_step_whose_outputs_torch_does_not_look_into_keeps_its_executable() -> None:
    @dataclasses.dataclass
    class Out:
        loss: torch.Tensor
        hidden: list[torch.Tensor]

    class Wrapped(Tower):
        def forward(self, x: torch.Tensor) -> Any:
            loss = super().forward(x)
            return Out(loss, [loss * 2])

    class Aside(Tower):
        def forward(self, x: torch.Tensor) -> Any:
            self.loss = super().forward(x)
            return self.loss.detach()

    for kind in (Wrapped, Aside):
        pair = twins("1GiB", kind())
        for each in pair:
            torch.manual_seed(3)
            first = each(rows(1))
            first = first.loss if kind is Wrapped else each.loss
            if each is pair[0]:
                ebbtide.set_budget(each, "2GiB")
            with torch.no_grad():
                pass
            second = each(rows(2))
            second = second.loss if kind is Wrapped else each.loss
            gc.collect()
            first.backward()
            second.backward()
        assert_same(pair)


def test_an_unfitted_model_finishes_what_is_in_flight() -> None:
    pair = twins("70%")
    losses = []
    for each in pair:
        torch.manual_seed(4)
        losses.append(each(rows(4)))
    ebbtide.unfit(pair[0])
    gc.collect()
    for loss in losses:
        loss.backward()
    assert_same(pair)

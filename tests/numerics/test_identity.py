"""A fitted model is still the user's model: its class, its keys, its copies; and unfit gives it back."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch

import ebbtide
from ebbtide.errors import UsageError
from ebbtide.units import format_bytes
from ebbtide.zoo import MLPChain


@pytest.fixture
def model() -> MLPChain:
    return ebbtide.fit(MLPChain(layers=2, width=8), "1MiB")


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def test_fit_returns_the_same_object_under_the_same_name() -> None:
    plain = MLPChain(layers=2, width=8)
    fitted = ebbtide.fit(plain, "1MiB")
    assert fitted is plain
    assert isinstance(fitted, MLPChain)
    assert type(fitted).__name__ == "MLPChain"
    assert type(fitted).__module__ == MLPChain.__module__
    assert str(fitted) == str(MLPChain(layers=2, width=8))


def test_state_dict_keys_stay_and_load(model: MLPChain) -> None:
    plain = MLPChain(layers=2, width=8)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    model(X).backward()
    plain(X).backward()
    assert torch.equal(model.layers[0].weight.grad, plain.layers[0].weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("when", ["before the first step", "after a step"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_plain_models(model: MLPChain, how: str, when: str, tmp_path: object) -> None:
    if when == "after a step":
        model(X).backward()
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, f"{tmp_path}/model.pt")
        twin = torch.load(f"{tmp_path}/model.pt", weights_only=False)
    assert type(twin) is MLPChain
    with pytest.raises(UsageError, match="a copy of a fitted model"):
        ebbtide.plan_of(twin)
    assert torch.equal(twin(X), model(X))
    ebbtide.fit(twin, "1MiB")(X).backward()
    assert ebbtide.plan_of(twin) is not None


def test_unfit_gives_the_plain_class_back(model: MLPChain) -> None:
    model(X).backward()
    assert ebbtide.unfit(model) is model
    assert type(model) is MLPChain
    model(X).backward()
    for ask in (ebbtide.unfit, ebbtide.plan_of, ebbtide.step_of, ebbtide.calls_of):
        with pytest.raises(UsageError, match="not fitted"):
            ask(model)


def test_a_backward_pending_at_unfit_still_runs(model: MLPChain) -> None:
    loss = model(X)
    ebbtide.unfit(model)
    loss.backward()
    planned = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(X).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(planned, model.parameters(), strict=True))  # type: ignore[arg-type]


def test_fit_again_after_unfit(model: MLPChain) -> None:
    ebbtide.unfit(model)
    ebbtide.fit(model, "2MiB")(X).backward()
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.budget_bytes == 2 * 2**20


def test_fit_twice_is_refused(model: MLPChain) -> None:
    with pytest.raises(UsageError, match="unfit"):
        ebbtide.fit(model, "1MiB")


def test_a_step_says_what_it_is(model: MLPChain) -> None:
    model(X).backward()
    assert re.fullmatch(
        r"<Step of MLPChain, \w+: planned [\d.]+ .iB of 1\.00 MiB, not measured, \d+ buffers verified>",
        repr(ebbtide.step_of(model)),
    )
    for _ in range(2):
        model.zero_grad()
        model(X).backward()
    step, plan = ebbtide.step_of(model), ebbtide.plan_of(model)
    assert step is not None
    assert plan is not None
    assert step.measured_above_bytes is not None
    assert f"measured {format_bytes(plan.resident_bytes + step.measured_above_bytes)}, " in repr(step)


def test_nothing_is_known_before_the_first_step(model: MLPChain) -> None:
    assert ebbtide.plan_of(model) is None
    assert ebbtide.step_of(model) is None

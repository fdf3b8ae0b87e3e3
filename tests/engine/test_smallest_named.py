"""The smallest budget that a refusal names is one that holds when it is asked for, whatever was known before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.cost import attach
from ebbtide.errors import BudgetError
from ebbtide.rewrites import facts
from ebbtide.zoo import MLPChain
from sampled import sampled


class Mean(nn.Module):
    """The mean of what layers give."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Classifier(nn.Module):
    """Its head is what a plan would rewrite."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1009, 16), nn.Linear(16, 1009, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.embedding(ids).tanh()), ids)


def _dropping() -> tuple[nn.Module, torch.Tensor]:
    """Its kernels take something besides their results."""
    return MLPChain(layers=4, width=16, dropout=0.1), torch.randn(64, 16)


def _convolving() -> tuple[nn.Module, torch.Tensor]:
    return Mean(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)), torch.randn(4, 3, 16, 16)


def _elementwise() -> tuple[nn.Module, torch.Tensor]:
    """Most of it may be written over what dies."""
    return Mean(nn.Linear(8, 8), nn.GELU(), nn.Tanh(), nn.GELU(), nn.Sigmoid()), torch.randn(512, 8)


def _classifying() -> tuple[nn.Module, torch.Tensor]:
    return Classifier(), torch.arange(128) % 1009


class TwoLosses(Classifier):
    """Logits that two read: ops over them are most of the step, and may be written over what dies."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(ids).tanh())
        return nn.functional.cross_entropy(logits, ids) + 0.3 * nn.functional.cross_entropy(logits, (ids + 1) % 1009)


def _classifying_twice() -> tuple[nn.Module, torch.Tensor]:
    return TwoLosses(), torch.arange(192) % 1009


class WideHead(nn.Module):
    """One buffer of its logits is more than its smallest budget; a form of its head keeps one, others need none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4099, 64), nn.Linear(64, 4099, bias=False)
        self.layer = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layer(self.embedding(ids))), ids)


def _classifying_widely() -> tuple[nn.Module, torch.Tensor]:
    return WideHead(), torch.arange(512)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "dropout": _dropping,
    "convolutions": _convolving,
    "elementwise": _elementwise,
    "head": _classifying,
    "two losses": _classifying_twice,
}


@pytest.fixture
def _cold(monkeypatch: pytest.MonkeyPatch, cache_directory: object) -> None:
    """Nothing is known of any kernel."""
    monkeypatch.setattr(attach, "_KNOWN", {})
    monkeypatch.setattr(attach, "_TIMED", {})
    monkeypatch.setattr(facts, "_KNOWN", {})


def _bytes_named(model: nn.Module, x: torch.Tensor) -> BudgetError:
    with pytest.raises(BudgetError) as caught:
        model(x)
    assert not any(each.grad is not None for each in model.parameters())
    return caught.value


@pytest.mark.usefixtures("_cold")
@pytest.mark.parametrize("asked", sampled([1, 5_000, "2%"], 1))
@pytest.mark.parametrize("name", MODELS)
def test_what_a_refusal_names_is_planned_when_asked_for(
    name: str, asked: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, x = MODELS[name]()
    model = ebbtide.fit(copy.deepcopy(plain), asked, progress=None)
    named = _bytes_named(model, x).smallest_bytes
    ebbtide.set_budget(model, named)
    model(x).backward()
    # In another process as well, which finds on disk what has been measured, and no plan.
    monkeypatch.setattr(attach, "_KNOWN", {})
    monkeypatch.setattr(attach, "_TIMED", {})
    monkeypatch.setattr(facts, "_KNOWN", {})
    other = ebbtide.fit(copy.deepcopy(plain), named, progress=None)
    other(x).backward()


@pytest.mark.usefixtures("_cold")
def test_the_refusal_says_what_its_smallest_budget_rests_on() -> None:
    model, x = _dropping()
    ebbtide.fit(model, 1, progress=None)
    notes = " ".join(getattr(_bytes_named(model, x), "__notes__", []))
    assert "rests on what all ops took that were tried out" in notes
    again = " ".join(getattr(_bytes_named(model, x), "__notes__", []))
    assert "tried out" not in again, "all is known by now"


@pytest.mark.parametrize(
    "name", ["elementwise", "head", "two losses", pytest.param("wide head", marks=pytest.mark.long)]
)
def test_the_same_is_named_whatever_was_asked_for_and_found_out_again(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each time by a process that knows nothing; the named budget itself holds in a first call."""
    plain, x = {**MODELS, "wide head": _classifying_widely}[name]()

    def asked(budget: int | str) -> tuple[nn.Module, BudgetError | None]:
        monkeypatch.setattr(attach, "_KNOWN", {})
        monkeypatch.setattr(attach, "_TIMED", {})
        monkeypatch.setattr(facts, "_KNOWN", {})
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(budget)))
        model = ebbtide.fit(copy.deepcopy(plain), budget, progress=None)
        try:
            model(x).backward()
        except BudgetError as refused:
            return model, refused
        return model, None

    errors = [asked(budget)[1] for budget in (1, "1%", 20_000)]
    named = [each.smallest_bytes for each in errors if each is not None]
    assert len(named) == len(errors)
    assert max(named) <= 1.01 * min(named)
    for times in (1, 1.4):  # more room may be enough for what some of the forms rest on, and not for the best
        budget = int(named[0] * times)
        model, refused = asked(budget)
        assert refused is None
        assert ebbtide.calls_of(model).planned == 1


@pytest.mark.parametrize("name", MODELS)
def test_what_a_process_with_room_names_holds_in_one_that_knows_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain, x = MODELS[name]()
    for directory in ("room", "none"):
        monkeypatch.setattr(attach, "_KNOWN", {})
        monkeypatch.setattr(attach, "_TIMED", {})
        monkeypatch.setattr(facts, "_KNOWN", {})
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / directory))
        if directory == "room":
            with pytest.raises(BudgetError) as refused:
                ebbtide.plan(copy.deepcopy(plain), (x,), budget=1, options=ebbtide.Options(progress=None))
    assert refused.value.smallest_bytes is not None
    model = ebbtide.fit(copy.deepcopy(plain), int(1.05 * refused.value.smallest_bytes), progress=None)
    model(x).backward()
    assert ebbtide.calls_of(model).planned == 1


def test_no_room_is_not_a_room_that_nobody_knows_of() -> None:
    from ebbtide.cost.profiling_budget import ProfilingBudget, free_bytes, profiling_within

    with profiling_within(ProfilingBudget(0)):
        assert free_bytes() == 0
    with profiling_within(ProfilingBudget(None)):
        assert free_bytes() == float("inf")
    assert not ProfilingBudget(0).holds(1)
    assert ProfilingBudget(None).holds(1)
    assert ProfilingBudget(0, refused_bytes=2).holds(2)

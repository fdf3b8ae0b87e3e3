"""The key of a call tells calls apart by what their steps depend on, and by nothing that is new at every call."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine import compiled
from ebbtide.engine.key import key_of


@dataclass
class Batch:
    x: torch.Tensor
    scale: float = 2.0
    more: dict[str, Any] = field(default_factory=dict)


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x


def rows(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 4)


def keyed(value: object) -> object:
    key = key_of((), (value,), {})
    hash(key)
    return key


MAKERS = {
    "dataclass": lambda: Batch(rows()),
    "nested dataclass": lambda: Batch(rows(), more={"inner": [Batch(rows())]}),
    "UserDict": lambda: UserDict(x=rows(), n=3),
    "default repr": lambda: Plain(Plain(rows())),
    "array": lambda: np.random.rand(3, 4),
    "function": lambda: lambda x: x * 2,
    "namespace": lambda: SimpleNamespace(x=rows(), name="a"),
    "cycle": lambda: _cycle(),
}


def _cycle() -> Plain:
    one = Plain(rows())
    one.other = Plain(one)  # type: ignore[attr-defined]
    return one


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_kind_of_argument_has_the_same_key(name: str) -> None:
    assert keyed(MAKERS[name]()) == keyed(MAKERS[name]())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Batch(rows()), Batch(rows(5))),
        (Batch(rows()), Batch(rows(), scale=3.0)),
        (Batch(rows()), Batch(rows().requires_grad_())),
        (Plain(1), Plain(True)),
        (Plain(1), Plain(1.0)),
        (UserDict(x=rows()), {"x": rows()}),
        (UserDict(x=rows()), UserDict(y=rows())),
        (np.zeros(3), np.zeros(4)),
        ([1, 2], [1, 3]),
        (Plain(rows()), Batch(rows())),
    ],
)
def test_another_kind_of_argument_has_another_key(one: object, other: object) -> None:
    assert keyed(one) != keyed(other)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.linear(batch["x"] if isinstance(batch, UserDict) else batch.x).square().mean()


@pytest.mark.parametrize("kind", [Batch, Plain, lambda x: UserDict(x=x)])
def test_objects_around_tensors_are_captured_once(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    captured = compiled.Capture.partition
    monkeypatch.setattr(compiled.Capture, "partition", lambda *given: (made.append(1), captured(*given))[1])
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    ebbtide.fit(model, "1GiB")
    for _ in range(4):
        x = rows()
        losses = [each(kind(x)) for each in (model, twin)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        assert torch.equal(model.linear.weight.grad, twin.linear.weight.grad)  # type: ignore[arg-type]
    assert len(made) == 1

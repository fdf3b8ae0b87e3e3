"""Copies and pickles of a fitted model are plain models, made as their class says."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import UsageError

X = torch.ones(2, 4)


class Plain(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.tag = "made"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()


def _again(kind: type[Plain], width: int, state: dict[str, Any]) -> Plain:
    model = kind(width)
    model.load_state_dict(state)
    model.tag = "rebuilt"
    return model


class Reduced(Plain):
    def __reduce__(self) -> Any:
        return _again, (self.__class__, 4, self.state_dict())


class ReducedByClass(Plain):
    def __reduce__(self) -> Any:
        return self.__class__, (4,), None, None, None

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = nn.Module.__hash__


class ReducedEx(Plain):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _again, (type(self), 4, self.state_dict())


class DeepCopied(Plain):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = type(self)(4)
        made.load_state_dict(self.state_dict())
        made.tag = "deep"
        return made


class Kept(Plain):
    """One that hands itself out instead of a copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class WithState(Plain):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tag": "from state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.tag += ", set"


class WithArguments(Plain):
    def __new__(cls, width: int) -> Any:
        made = super().__new__(cls)
        made.given = width
        return made

    def __getnewargs__(self) -> tuple[int]:
        return (4,)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


WAYS: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": pickled}
KINDS = [Plain, Reduced, ReducedEx, DeepCopied, WithState, WithArguments]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_what_it_would_be_of_a_plain_model(kind: type[Plain], way: str) -> None:
    model = kind(4)
    expected = WAYS[way](model)
    found = WAYS[way](ebbtide.fit(model, "1GiB"))
    assert type(found) is kind
    assert vars(found).keys() == vars(expected).keys()
    assert found.tag == expected.tag
    assert torch.equal(found(X), expected(X))
    with pytest.raises(UsageError, match="a copy of a fitted model"):
        ebbtide.plan_of(found)
    ebbtide.fit(found, "1GiB")
    assert isinstance(ebbtide.unfit(found), kind)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_class_that_makes_itself_anew(way: str) -> None:
    found = WAYS[way](ebbtide.fit(ReducedByClass(), "1GiB"))
    assert type(found) is ReducedByClass


def test_who_hands_itself_out_stays_fitted() -> None:
    model = ebbtide.fit(Kept(), "1GiB")
    assert copy.deepcopy(model) is model
    assert ebbtide.unfit(model) is model
    assert type(model) is Kept


def test_a_model_inside_of_another_is_copied_plain() -> None:
    outer = nn.Sequential(ebbtide.fit(Reduced(), "1GiB"))
    for way in WAYS.values():
        inner = way(outer)[0]
        assert inner is outer[0] or type(inner) is Reduced

"""Corrected descriptions of fake tensors are kept from one capture to the next, and reach nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, _DispatchCacheKey

from ebbtide.torch_seams import fake_tensors
from ebbtide.torch_seams.fake_tensors import Dispatch, described_by, unremembered

EXP = torch.ops.aten.exp.default


class _Doubles:
    """A correction by which everything has two elements of float64, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def __call__(self, described: Dispatch) -> Dispatch:
        def dispatch(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            self.asked.append(func)
            result = described(mode, func, types, args, kwargs)
            if func is not EXP:
                return result
            with mode:
                return torch.empty(2, dtype=torch.float64)

        return dispatch

    def exps(self) -> int:
        return self.asked.count(EXP)


@pytest.fixture
def name() -> Iterator[Hashable]:
    """A name that no other test has; afterwards nothing is remembered."""
    yield object()
    fake_tensors._remembered.clear()


def exp_of_three(mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        return torch.empty(3).exp()


def test_equal_names_are_asked_once_in_any_mode(name: Hashable) -> None:
    correct = _Doubles()
    for _ in range(3):
        with described_by(correct, name=name):
            assert exp_of_three(FakeTensorMode()).dtype == torch.float64
    assert correct.exps() == 1


def test_without_a_name_each_is_asked_anew() -> None:
    correct = _Doubles()
    for _ in range(2):
        with described_by(correct):
            exp_of_three(FakeTensorMode())
    assert correct.exps() == 2


def _deterministic() -> None:
    torch.use_deterministic_algorithms(True)


@pytest.mark.parametrize("change", [lambda: torch.set_num_threads(2), _deterministic], ids=["threads", "deterministic"])
def test_what_layouts_depend_on_is_asked_anew(change: Callable[[], None], name: Hashable) -> None:
    correct = _Doubles()
    with described_by(correct, name=name):
        exp_of_three(FakeTensorMode())
    try:
        change()
        with described_by(correct, name=name):
            exp_of_three(FakeTensorMode())
    finally:
        torch.use_deterministic_algorithms(False)
    assert correct.exps() == 2


def test_another_correction_inside_is_another_set(name: Hashable) -> None:
    outer, inner = _Doubles(), _Doubles()
    with described_by(outer, name=name):
        exp_of_three(FakeTensorMode())
        with described_by(inner, name="inner"):
            exp_of_three(FakeTensorMode())
        exp_of_three(FakeTensorMode())
    assert (outer.exps(), inner.exps()) == (2, 1)


def test_torchs_own_descriptions_neither_come_in_nor_change(name: Hashable) -> None:
    assert exp_of_three(FakeTensorMode()).dtype == torch.float32
    with described_by(_Doubles(), name=name):
        assert exp_of_three(FakeTensorMode()).dtype == torch.float64
    assert exp_of_three(FakeTensorMode()).dtype == torch.float32


def test_another_thread_sees_torchs_descriptions_and_leaves_none(name: Hashable) -> None:
    correct = _Doubles()
    seen: list[torch.dtype] = []
    with described_by(correct, name=name):
        thread = threading.Thread(target=lambda: seen.append(exp_of_three(FakeTensorMode()).dtype))
        thread.start()
        thread.join()
        assert exp_of_three(FakeTensorMode()).dtype == torch.float64
    assert seen == [torch.float32]


def test_what_is_asked_inside_of_a_description_is_not_kept(name: Hashable) -> None:
    correct = _Doubles()
    with described_by(correct, name=name):
        for _ in range(2):
            with unremembered():
                exp_of_three(FakeTensorMode())
        exp_of_three(FakeTensorMode())
    assert correct.exps() == 3


def test_graphs_known_by_their_place_in_memory_are_forgotten(name: Hashable) -> None:
    key = _DispatchCacheKey((torch.ops.higher_order.invoke_subgraph, 1))
    FakeTensorMode.cache[key] = None  # type: ignore[assignment]
    with described_by(_Doubles(), name=name):
        FakeTensorMode.cache[key] = None  # type: ignore[assignment]
    assert key not in FakeTensorMode.cache
    with described_by(_Doubles(), name=name):
        assert key not in FakeTensorMode.cache


def test_no_more_than_so_many_are_kept(name: Hashable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_tensors, "_MOST_REMEMBERED", 1)
    correct = _Doubles()
    for _ in range(2):
        with described_by(correct, name=name):
            exp_of_three(FakeTensorMode())
    assert correct.exps() == 2
    monkeypatch.setattr(fake_tensors, "_MOST_SETS", 1)
    with described_by(correct, name="another"):
        assert len(fake_tensors._remembered) == 1
    fake_tensors._remembered.clear()

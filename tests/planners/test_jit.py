"""Numba's files are a cache like any other: what is wrong with one is a miss, and none is needed."""

from __future__ import annotations

from typing import Any

import pytest

from ebbflow.planners.search import jit


class Damaged:
    """Numba's cache of a function whose files are damaged, on a disk that is full."""

    cache_path = "somewhere"

    def __init__(self) -> None:
        self.flushed = 0

    def load_overload(self, *_: object) -> object:
        raise EOFError("Ran out of input")

    def save_overload(self, *_: object) -> None:
        raise OSError("disk full")

    def flush(self) -> None:
        self.flushed += 1
        raise OSError("disk full")


def test_a_damaged_file_is_a_miss_and_goes() -> None:
    numbas = Damaged()
    cache = jit._Cache(numbas)
    assert cache.load_overload("signature", None) is None
    assert numbas.flushed == 1
    cache.save_overload("signature", None)
    assert cache.cache_path == "somewhere"


def test_an_interrupt_is_no_miss() -> None:
    class Interrupted(Damaged):
        def load_overload(self, *_: object) -> object:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jit._Cache(Interrupted()).load_overload("signature", None)


def test_without_a_place_for_files_functions_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object) -> Any:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("numba.core.ccallback.FunctionCache", nowhere)
    monkeypatch.setattr("numba.core.dispatcher.FunctionCache", nowhere)
    monkeypatch.setattr(jit._Apart, "waiting", [])

    @jit.inner
    def twice(x: int) -> int:
        return 2 * x

    @jit.apart
    def twice_and_one(x: int) -> int:
        return twice(x) + 1

    assert twice_and_one(3) == 7

"""Compiled code is good for the sources of all compiled code: numba looks at a function's own module alone."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest

from ebbtide.planners.search import jit
from ebbtide.planners.search.jit import Words


def test_a_file_of_other_sources_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is inlined is from other modules, such as the layout of the memory."""

    def three() -> int:
        return 3

    first = jit.inner(three)
    kept = first._cache._cache_file._source_stamp  # type: ignore[attr-defined]
    assert kept[1] == jit.sources_digest(Path(__file__).parent)
    monkeypatch.setattr(jit, "sources_digest", lambda own: "another")
    second = jit.inner(three)
    assert second._cache._cache_file._source_stamp != kept  # type: ignore[attr-defined]


def test_functions_of_one_name_in_two_modules_are_two() -> None:
    """Numba takes external functions of one symbol and signature for one."""

    def answer(m: Words) -> int:
        return m[0]

    def other(m: Words) -> int:
        return m[1]

    other.__name__, other.__module__ = answer.__name__, "elsewhere"
    first, second = jit.apart(answer), jit.apart(other)
    words = cast(Words, np.array([5, 7]))
    assert (first(words), second(words)) == (5, 7)


def test_the_digest_covers_every_module_with_compiled_code() -> None:
    root = Path(jit.__file__).parents[1]
    compiled = {
        path.parent
        for path in root.rglob("*.py")
        if "search.jit import" in path.read_text(encoding="utf-8") or "search.layout import" in path.read_text()
    }
    assert compiled == {root / folder for folder in jit.COMPILED}

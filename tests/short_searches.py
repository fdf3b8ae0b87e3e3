"""Short searches for a folder of tests: how good plans are is tested with the planners, that they hold elsewhere."""

from __future__ import annotations

import inspect

import pytest

import ebbtide


def short_searches(effort: int) -> object:
    """A fixture for a ``conftest``: searches take ``effort`` moves where a test names no other number."""

    @pytest.fixture(autouse=True, name="_short_searches")
    def searches_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(inspect.unwrap(ebbtide.Options.__init__).__kwdefaults__, "effort", effort)

    return searches_are_short

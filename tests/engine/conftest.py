"""Searches are short here: how good plans are is tested with the planners."""

from __future__ import annotations

import inspect

import pytest

import ebbflow


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow._api.fit.DEFAULT_EFFORT", 1_000)
    monkeypatch.setitem(inspect.unwrap(ebbflow.plan).__kwdefaults__, "effort", 1_000)

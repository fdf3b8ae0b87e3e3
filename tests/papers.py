"""Papers' models for tests that are about any model; skipped where ``ebbtide-published`` is not installed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ebbtide.case import Case

__all__ = ["paper_model"]


def paper_model(name: str, *, small: bool = False) -> Callable[..., Case]:
    """The function of a case; at a size for tests where that is asked for."""
    made = pytest.importorskip("ebbtide_published.zoo.small").PAPERS[name]
    return made if small else made.func

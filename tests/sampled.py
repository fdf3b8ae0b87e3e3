"""Cases of a test of which every change runs some, and ``make nightly`` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["sampled"]


def sampled(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Arguments of ``pytest.mark.parametrize``: ``cases``, of which those that are not ``kept`` are long.

    A case of several arguments is a tuple.
    """
    cases = list(cases)
    assert set(kept) <= set(cases), "what is kept is one of them"
    arguments = [each if isinstance(each, tuple) else (each,) for each in cases]
    marks = [() if each in kept else (pytest.mark.long,) for each in cases]
    return [pytest.param(*each, marks=some) for each, some in zip(arguments, marks, strict=True)]

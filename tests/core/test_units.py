"""Bytes as people write and read them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.errors import UsageError
from ebbflow.units import Budget, format_bytes, format_percent, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (1, 1),
        ("123456B", 123456),
        ("12GiB", 12 * 2**30),
        (" 12 gib ", 12 * 2**30),
        ("8GB", 8 * 10**9),
        ("1.5KiB", 1536),
        ("0.7kB", 700),
        ("1TiB", 2**40),
        ("1.0000000001GiB", 2**30),
    ],
)
def test_sizes_are_parsed_exactly(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "12", "12G", "GiB", "-1GiB", "1e9B", "12 giga", "0.1B", 0, -5, True, 1.5, None])
def test_what_is_no_size_is_refused_with_the_accepted_forms(text: Any) -> None:
    with pytest.raises(UsageError, match="accepted: an int") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        (1000, Budget(bytes=1000)),
        ("8GB", Budget(bytes=8 * 10**9)),
        ("60%", Budget(share=0.6)),
        ("12.5 %", Budget(share=0.125)),
        (Budget(bytes=7), Budget(bytes=7)),
    ],
)
def test_budgets_are_parsed(value: Any, budget: Budget) -> None:
    assert Budget.parse(value) == budget


@pytest.mark.parametrize("value", ["60 percent", "0%", "1001%", "%", 0, "", None, 0.5])
def test_what_is_no_budget_is_refused_with_the_accepted_forms(value: Any) -> None:
    with pytest.raises(UsageError, match="accepted: an int"):
        Budget.parse(value)


def test_a_budget_is_bytes_or_a_share() -> None:
    with pytest.raises(UsageError, match="either bytes or a share"):
        Budget()
    with pytest.raises(UsageError, match="either bytes or a share"):
        Budget(bytes=1, share=0.5)


def test_shares_are_of_the_unplanned_peak_and_rounded_down() -> None:
    assert Budget.parse("60%").resolve(1001) == 600
    assert Budget.parse(5000).resolve(1001) == 5000
    assert (str(Budget.parse("60%")), str(Budget.parse("1KiB"))) == ("60%", "1024B")


@given(st.integers(1, 100), st.integers(1, 10**15))
def test_a_share_in_percent_resolves_exactly(percent: int, peak: int) -> None:
    assert Budget.parse(f"{percent}%").resolve(peak) == percent * peak // 100


@given(st.integers(1, 2**60))
def test_bytes_survive_their_text(count: int) -> None:
    assert parse_bytes(f"{count}B") == count


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (12 * 2**30, "12.00 GiB"), (-2048, "-2.00 KiB")],
)
def test_sizes_are_printed(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_shares_and_seconds_are_printed() -> None:
    assert format_percent(0.0325) == "3.25 %"
    assert [format_seconds(s) for s in (83e-5, 0.0124, 3.21)] == ["830 us", "12.4 ms", "3.21 s"]

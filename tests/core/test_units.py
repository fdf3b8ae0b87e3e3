"""Bytes as people write and read them."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import UsageError
from ebbtide.planners import Progress
from ebbtide.planners.search.greedy import PROVEN
from ebbtide.units import (
    Budget,
    format_allowed,
    format_bytes,
    format_count,
    format_gap,
    format_percent,
    format_seconds,
    format_share,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (1, 1),
        (np.int64(7), 7),
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
    with pytest.raises(UsageError, match=r"accepted: .*12GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("123456", "'123456' has no unit: write '123456B' if bytes are meant"),
        (" 12 ", "' 12 ' has no unit: write '12%' for a share of the unplanned peak, '12GiB' for bytes"),
        ("0", "'0' is not more than zero"),
        ("-5GiB", "'-5GiB' is not more than zero"),
        ("-3%", "'-3%' is not more than zero"),
        ("0%", "'0%' is not more than zero"),
        ("+0.0 MB", "'+0.0 MB' is not more than zero"),
        ("8G", "'8G': G is no unit here: write '8GiB' for 8 times 1024**3 bytes, '8GB' for 8 times 1000**3"),
        ("1.5k", "'1.5k': k is no unit here: write '1.5KiB' for 1.5 times 1024 bytes, '1.5KB' for 1.5 times 1000"),
        ("5 gigs", "'5 gigs': gigs is no unit here"),
        ("1e9", "'1e9' is not a number with a unit"),
        ("60 percent", "'60 percent': percent is no unit here: write '60%' for a share of the unplanned peak"),
        ("1001%", "'1001%' is more than 1000 % of the unplanned peak"),
        ("", "'' is not a number with a unit"),
        ("0.1B", "'0.1B' is less than one byte"),
        (0, "0 is not more than zero"),
        (-5, "-5 is not more than zero"),
        (0.5, "0.5 is neither a whole number of bytes nor a text"),
        (True, "True is neither"),
    ],
)
def test_a_refusal_says_what_is_wrong_with_this_very_value(text: Any, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        Budget.parse(text)
    message, _, accepted = str(caught.value).partition("; accepted: ")
    assert message.startswith(why)
    assert ("an int" in accepted) is not isinstance(text, str), "a text, as of the command line, cannot become an int"
    assert caught.value.argument == "budget"
    assert caught.value.value is text


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
    with pytest.raises(UsageError, match=r"accepted: .*60%"):
        Budget.parse(value)


def test_a_text_is_no_number_of_bytes() -> None:
    for wrong in ({"bytes": "12GiB"}, {"share": "50%"}):
        with pytest.raises(UsageError, match=r"ebbtide\.Budget\.parse"):
            Budget(**wrong)  # type: ignore[arg-type]


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


@given(st.integers(0, 2**60))
def test_a_need_as_it_is_printed_is_enough(count: int) -> None:
    shown = parse_bytes(format_bytes(count)) if count else 0
    assert count <= shown <= max(1.01 * count, count + 1)


@given(st.integers(1, 2**60))
def test_what_is_allowed_is_never_more_than_is_printed(count: int) -> None:
    shown = parse_bytes(format_allowed(count))
    assert 0.99 * count - 1 <= shown <= count


@given(st.integers(1, 2**43), st.integers(1, 2**43))
def test_a_share_as_it_is_printed_is_enough(part: int, whole: int) -> None:
    assert part > 10 * whole or Budget.parse(format_share(part, whole)).resolve(whole) >= part


@given(st.integers(1, 2**43), st.integers(1, 2**43))
def test_bytes_over_bytes_give_the_bytes_back(part: int, whole: int) -> None:
    part = min(part, whole)
    assert Budget(share=part / whole).resolve(whole) == part


@given(st.decimals(min_value="0.01", max_value=1000, places=4), st.integers(1, 2**43))
def test_a_budget_is_never_more_than_was_written(percent: Decimal, peak: int) -> None:
    assert Budget.parse(f"{percent}%").resolve(peak) <= Fraction(percent) * peak / 100 + Fraction(1, 1000)


@pytest.mark.parametrize(
    ("count", "needed", "allowed"),
    [
        (1025, "1.01 KiB", "1.00 KiB"),
        (2**20 - 1, "1.00 MiB", "1023.99 KiB"),
        (2**30 + 1, "1.01 GiB", "1.00 GiB"),
        (2**60 + 1, "1024.01 PiB", "1024.00 PiB"),
    ],
)
def test_needs_are_rounded_up_and_what_is_allowed_down(count: int, needed: str, allowed: str) -> None:
    assert (format_bytes(count), format_allowed(count)) == (needed, allowed)


def test_shares_and_seconds_are_printed() -> None:
    assert format_percent(0.0325) == "3.25 %"
    assert [format_seconds(s) for s in (83e-5, 0.0124, 3.21)] == ["830 us", "12.4 ms", "3.21 s"]


@pytest.mark.parametrize(
    ("gap", "text"),
    [
        (0.0, "0.00 %"),
        (-1e-12, "0.00 %"),
        (PROVEN, "0.00 %"),
        (4.2e-5, "<0.01 %"),
        (6e-5, "0.01 %"),
        (0.3444, "34.44 %"),
    ],
)
def test_no_gap_is_shown_only_where_plan_and_bound_meet(gap: float, text: str) -> None:
    """So that a plan with ``gap 0.00 %`` is an optimal one."""
    assert format_gap(gap) == text
    shown = str(Progress("local search", best_overhead=0.1 + gap, bound=0.1))
    assert shown.endswith(f"gap {text}") or gap == PROVEN  # which a sum of floats misses


@pytest.mark.parametrize(("count", "text"), [(0, "0 ops"), (1, "1 op"), (2, "2 ops")])
def test_one_thing_is_no_plural(count: int, text: str) -> None:
    assert format_count(count, "op") == text

"""What travels between ranks: errors, and which exchanges have begun."""

from __future__ import annotations

import pytest

from ebbtide.errors import BudgetError, CaptureError, RankError, VerificationError
from ebbtide.ranks.journal import Event, Journal
from ebbtide.ranks.messages import Failure

FORWARD, BACKWARD = Event("forward", 0), Event("backward", 0)


def test_a_refused_budget_is_one_on_every_rank_with_its_facts() -> None:
    error = BudgetError(
        "too small", budget_bytes=10, floor_bytes=20, smallest_bytes=30, resident_bytes=5, pinned_by="mm at net.py:3"
    )
    error.add_note("and a note")
    there = Failure.from_text(Failure.of(2, error).to_text())
    found = there.error(smallest_bytes=40)
    assert isinstance(found, BudgetError)
    assert str(found).startswith("rank 2: too small")
    assert "and a note" in str(found)
    assert (found.budget_bytes, found.floor_bytes, found.smallest_bytes) == (10, 20, 40)
    assert there.smallest_bytes == 30


@pytest.mark.parametrize("error", [VerificationError("bits", buffer="b"), CaptureError("no", remedy="do", op="mm")])
def test_errors_of_ours_keep_their_class(error: Exception) -> None:
    found = Failure.from_text(Failure.of(1, error).to_text()).error()
    assert type(found) is type(error)
    assert vars(found) == vars(error)


def test_other_errors_become_a_rank_error() -> None:
    found = Failure.from_text(Failure.of(1, ValueError("bad")).to_text()).error()
    assert isinstance(found, RankError)
    assert found.rank == 1
    assert "rank 1 has raised ValueError: bad" in str(found)
    assert "rank 3 was interrupted" in str(Failure.of(3, KeyboardInterrupt()).error())


def test_a_rank_lacks_what_the_furthest_has_begun() -> None:
    own, other = Journal(), Journal()
    for each in (FORWARD, BACKWARD, FORWARD, BACKWARD):
        other.begin(each)
    for each in (FORWARD, BACKWARD, FORWARD):
        own.begin(each)
    assert own.missing(other) == [BACKWARD]
    assert other.missing(own) == []
    own.take_back(FORWARD)
    assert own.missing(Journal.from_text(other.to_text())) == [FORWARD, BACKWARD]
    own.take_back(BACKWARD)
    assert own.last[-1] == FORWARD
    assert Journal().missing(Journal(20, other.last)) == [], "nobody remembers what came first"

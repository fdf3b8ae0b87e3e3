"""The agenda of ``make gpu``: the order, what fits into the seconds, what is remembered. Entries are made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))
sys.path.insert(0, str(ROOT / "benchmarks"))

import agenda  # noqa: E402
from agenda import AGENDA, TOO_LATE, Entry, run_agenda, run_command  # noqa: E402

from cards.subjects import CASES  # noqa: E402

FACTS = {"code": "0123", "torch": "2.13.0", "card": "a card"}
LAST, FIRST, LONG = Entry("last", 3, 30.0, ("last",)), Entry("first", 1, 20.0, ("first",)), Entry("long", 2, 80.0, ())


class Card:
    """Runs entries on a clock of its own: each takes as long as ``takes`` says, and ends as ``errors`` says."""

    def __init__(self, takes: dict[str, float] | None = None, errors: dict[str, str] | None = None) -> None:
        self.now, self.ran = 0.0, list[str]()
        self._takes, self._errors = takes or {}, errors or {}

    def run(self, command: Sequence[str], seconds: float) -> str | None:
        [name] = command or ("long",)
        self.ran.append(name)
        taken = self._takes.get(name, 10.0)
        self.now += min(taken, seconds)
        return TOO_LATE if taken > seconds else self._errors.get(name)

    def __call__(self, results: Path, seconds: float, facts: dict[str, str] | None = None, **options: Any) -> Any:
        return run_agenda(
            [LAST, LONG, FIRST],
            facts or FACTS,
            results,
            seconds=seconds,
            run=self.run,
            clock=lambda: self.now,
            **options,
        )


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "gpu" / "agenda.json"


def test_the_most_important_come_first_and_only_what_fits_is_begun(results: Path) -> None:
    card = Card({"first": 15.0})
    became = card(results, seconds=90.0)
    assert card.ran == ["first", "last"]
    assert became == {"done": [], "passed": ["first", "last"], "failed": [], "left": ["long (80 s)"]}


def test_a_run_goes_on_where_another_ended(results: Path) -> None:
    Card()(results, seconds=25.0)
    card = Card()
    became = card(results, seconds=200.0)
    assert (card.ran, became["done"]) == (["long", "last"], ["first"])
    nothing = Card()
    assert nothing(results, seconds=200.0)["done"] == ["first", "long", "last"]
    assert nothing.ran == []
    again = Card()
    again(results, seconds=200.0, again=True)
    assert again.ran == ["first", "long", "last"]


@pytest.mark.parametrize("what", FACTS)
def test_a_result_of_other_code_or_card_does_not_count(results: Path, what: str) -> None:
    Card()(results, seconds=200.0)
    card = Card()
    card(results, seconds=200.0, facts={**FACTS, what: "other"})
    assert card.ran == ["first", "long", "last"]


def test_what_failed_is_run_again(results: Path) -> None:
    assert Card(errors={"first": "exit 1"})(results, seconds=200.0)["failed"] == ["first"]
    card = Card()
    assert card(results, seconds=200.0)["passed"] == ["first"]


def test_the_seconds_that_an_entry_took_are_its_estimate(results: Path) -> None:
    """One that was ended is given more the next time."""
    Card({"first": 60.0})(results, seconds=50.0)
    card = Card({"first": 60.0})
    assert card(results, seconds=70.0)["left"] == ["first (75 s)", "long (80 s)"]
    assert card(results, seconds=76.0)["passed"] == ["first"]
    assert json.loads(results.read_text())["first"] == {"seconds": 60.0, "error": None, "facts": FACTS}


def test_a_file_that_was_cut_off_is_begun_anew(results: Path) -> None:
    Card()(results, seconds=200.0)
    results.write_text(results.read_text()[:30])
    card = Card()
    card(results, seconds=200.0)
    assert card.ran == ["first", "long", "last"]


@pytest.mark.parametrize(
    ("code", "said"), [("pass", None), ("raise SystemExit(3)", "exit 3"), ("import time; time.sleep(60)", TOO_LATE)]
)
def test_commands_end_in_time(code: str, said: str | None) -> None:
    assert run_command(["-S", "-c", code], 1.0 if said == TOO_LATE else 60.0) == said


def test_the_agenda_has_every_test_of_the_card_and_every_case_of_its_benchmark() -> None:
    assert len({each.name for each in AGENDA}) == len(AGENDA)
    words = {word for each in AGENDA for word in each.command}
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == {word for word in words if word.startswith("tests/gpu/")}
    assert set(CASES) <= words


def test_without_a_card_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["agenda.py"])
    assert agenda.main() == 2
    assert capsys.readouterr().err.splitlines() == [agenda.NO_CARD]

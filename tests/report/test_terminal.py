"""Text on a terminal ends between words; anything else gets the lines as they are."""

from __future__ import annotations

import os
from io import StringIO

import pytest

from ebbtide.report.text import terminal
from ebbtide.report.text.terminal import on_terminal, wrapped

LINE = "  bound      18.03 % (order: program, boundary: captured, tiers: none, costs: given), a bound's class"


class Screen(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_words_stay_whole_and_stand_under_each_other(width: int) -> None:
    lines = wrapped(LINE, width).split("\n")
    assert max(map(len, lines)) <= width
    assert " ".join(each.strip() for each in lines).split() == LINE.split()
    assert {len(each) - len(each.lstrip()) for each in lines[1:]} == {13}


@pytest.mark.parametrize("line", ["short", "", "  try: ebbtide plan zoo:gpt --budget 1B " + "x " * 40, "word" * 30])
def test_what_fits_and_what_is_copied_stays_one_line(line: str) -> None:
    assert wrapped(line, 60) == line


def test_a_terminal_gets_lines_of_its_width_and_a_file_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.shutil, "get_terminal_size", lambda: os.terminal_size((50, 24)))
    screen, file = Screen(), StringIO()
    for stream in (screen, file):
        print(LINE, LINE, sep="\n", file=on_terminal(stream))
    assert max(map(len, screen.getvalue().split("\n"))) <= 50
    assert screen.getvalue().endswith("\n")
    assert file.getvalue() == f"{LINE}\n{LINE}\n"

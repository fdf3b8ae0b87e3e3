"""Every code block of the README and of the pages in ``docs`` runs, and prints what the page shows.

1. A python block is a file, named by its first line, and is run by itself in one folder that all blocks share: a script
   in a process of its own, forked from one that has imported torch (``reader.py``).
2. A console block is ``$ ebbtide ...`` with its output. An sh block holds ``make`` targets, which must exist, and
   commands that a console block shows with their output.
3. The text block after a python block is its output. Every word has to be there.
4. Bytes that follow from the step alone are the same on every machine: budget, resident bytes, the unplanned peak, the
   smallest budget where it was searched for, and the floor are what is shown, digit by digit. What follows from costs
   that were measured here (times, with them the plan, its peak and its status) may be another.
5. For a machine of the catalogue nothing is measured here: statuses are those that are shown, and so are all numbers up
   to :data:`TOLERANCE`, since another processor sums floats in another order. How long planning took is left out.
6. So searches for plans are short where costs are measured here, unless a block says how long they are: any plan will
   do. The smallest budget and plans for machines of the catalogue are searched for as long as a reader's are.
7. A block without a language is a drawing or a listing of commands; it is not run.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pages import ROOT, Block, all_blocks, prose, read
from typer.testing import CliRunner

import ebbtide
from ebbtide.cli import app
from ebbtide.planners.search import smallest

BLOCKS = all_blocks()
PYTHON = [block for block in BLOCKS if block.language == "python"]
LONG = ("biggest_first.py", "finetune.py", "finetune_lora.py", "frontier.py", "largest.py", "through_the_disk.py")
CONSOLE = [block for block in BLOCKS if block.language == "console"]
CONSOLE_TEXT = "\n".join(block.text for block in CONSOLE)
TAKES_LONG = re.compile("llama_8b|max-batch")


TOLERANCE = 0.02
SHORT = 300
"""Effort of searches, definition 6."""
NUMBER = re.compile(r"(?<![\w.])\d[\d.]*")
OF_THE_PLAN = ", what this plan needs"
"""Of a smallest budget that was not searched for."""
OWN_BYTES = re.compile(
    r"^(?:budget|resident|smallest|floor) |\bbytes\b|\bresident\b|of the unplanned [\d.]+ .?i?B"
    r"|of [\d.]+ .?i?B.*, [\d.]+ .?i?B without"
)


def words(text: str) -> list[str]:
    """The lines of ``text`` without numbers, units and statuses: definition 3."""
    text = re.sub(r"<?\d[\d.]*", "#", text)
    text = re.sub(r"# (?:[KMGT]iB|B|us|ms|s)\b", "# unit", text)
    text = re.sub(r"\b(?:OPTIMAL|FEASIBLE)\b", "STATUS", text)
    text = re.sub(r"(status) .*", r"\1", text)
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
    # Which ops are rerun follows from costs; that some are listed does not.
    kept = [line.partition(" ")[0] if line.startswith(("rerun ", "peak at ")) else line for line in lines]
    return [line for index, line in enumerate(kept) if line != "rerun" or kept[index - 1] != "rerun"]


def own_bytes(text: str) -> list[str]:
    """What of ``text`` is the same on every machine: definition 4."""
    found: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if (match := OWN_BYTES.search(line)) and OF_THE_PLAN not in line:
            found.append(match[0] if match[0].startswith("of ") else line)
    return found


def figures(text: str) -> list[str]:
    """The numbers and statuses of ``text``, and what they are of: definition 5."""
    found: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if not line.startswith(("rerun ", "peak at ")) and "has its peak at" not in line:
            found += re.findall(rf"\b(?:OPTIMAL|FEASIBLE|INFEASIBLE)\b|{NUMBER.pattern}(?: \w+)?", _without_clock(line))
    return found


def _without_clock(line: str) -> str:
    """A row of ``ebbtide compare`` without its last column, how long planning took."""
    return re.sub(r"\s[\d.]+ (?:ms|us|s)$", "", line)


def close(one: str, other: str) -> bool:
    """Whether two of :func:`figures` are the same up to the tolerance."""
    (a, *unit), (b, *other_unit) = one.split(), other.split()
    if not (NUMBER.fullmatch(a) and NUMBER.fullmatch(b)) or "." not in a + b:
        return one == other
    return unit == other_unit and abs(float(a) - float(b)) <= max(TOLERANCE * float(a), 0.02)


def assert_shown(printed: str, shown: str, *, of_catalogue: bool) -> None:
    """Hold what a block prints against what its page shows."""
    assert words(printed) == words(shown)
    assert own_bytes(printed) == own_bytes(shown)
    if of_catalogue:
        pairs = list(zip(figures(printed), figures(shown), strict=True))
        assert not [pair for pair in pairs if not close(*pair)]


def run(command: list[str], folder: Path) -> str:
    """What ``command`` prints; it has to succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader saves the blocks."""
    path = tmp_path_factory.mktemp("pages")
    for block in PYTHON:
        (path / block.name).write_text(block.text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def script(folder: Path) -> Iterator[Callable[[Block, int], str]]:
    """Runs a python block at an effort, and gives what it prints; it has to succeed."""
    command = [sys.executable, str(Path(__file__).with_name("reader.py"))]
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        told, answers = reader.stdin, reader.stdout
        assert told is not None
        assert answers is not None

        def run_block(block: Block, effort: int) -> str:
            output, errors = (folder / f"{block.name}.{kind}" for kind in ("out", "err"))
            print(json.dumps([block.name, str(output), str(errors), effort]), file=told, flush=True)
            assert answers.readline() == "0\n", errors.read_text(encoding="utf-8") if errors.exists() else "no reader"
            return output.read_text(encoding="utf-8")

        yield run_block
        told.close()


@pytest.fixture
def _whole_descents(monkeypatch: pytest.MonkeyPatch, short_descents: int) -> None:
    """The smallest budget is what a reader gets."""
    monkeypatch.setattr(smallest, "FIRST_EFFORT", short_descents)


def test_blocks_are_of_kinds_that_are_tested() -> None:
    assert {block.language for block in BLOCKS} <= {"python", "console", "sh"}
    assert PYTHON
    assert CONSOLE
    names = [block.name for block in PYTHON]
    assert all(re.fullmatch(r"\w+\.py", name) for name in names), "the first line names the file"
    assert len(set(names)) == len(names), "two blocks have one name"


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [pytest.param(each, marks=[pytest.mark.long] if each.name in LONG else [], id=each.name) for each in PYTHON],
)
def test_python_block_prints_what_the_page_shows(block: Block, script: Callable[[Block, int], str]) -> None:
    of_catalogue = 'machine="' in block.text
    shown_in_full = of_catalogue or "smallest" in block.text + block.output  # what a search at its default finds
    printed = script(block, 0 if shown_in_full else SHORT)
    assert_shown(printed, block.output, of_catalogue=of_catalogue)


@pytest.mark.slow
@pytest.mark.usefixtures("_whole_descents")
@pytest.mark.parametrize(
    "block",
    [pytest.param(each, marks=pytest.mark.long) if TAKES_LONG.search(each.text) else each for each in CONSOLE],
    ids=lambda block: block.text.partition("\n")[0][2:],
)
def test_console_block_prints_what_the_page_shows(
    block: Block, folder: Path, script: Callable[[Block, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has imported torch already."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a case's folder is added to it
    commands = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
    for command in commands:
        line, _, output = command.partition("\n")
        program, *arguments = shlex.split(line)
        assert program == "ebbtide"
        _make_what_it_reads(arguments, script)
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert_shown(done.stdout, output, of_catalogue="--machine" in arguments)


def _make_what_it_reads(arguments: list[str], script: Callable[[Block, int], str]) -> None:
    """Run what writes the plans that this command reads, if it has not run: tests may run in any order."""
    for name in arguments:
        if not name.endswith(".json") or Path(name).exists():
            continue
        for block in PYTHON:
            if f'save("{name}")' in block.text:
                script(block, SHORT)
        for line in re.findall(rf"^\$ ebbtide (.*--out {re.escape(name)}.*)$", CONSOLE_TEXT, flags=re.MULTILINE):
            if (others := shlex.split(line)) != arguments:
                assert CliRunner().invoke(app, others).exit_code == 0


SHOWN = (
    "x fits with a plan: 50.00 MiB of 56.67 MiB, 80.00 MiB without\n"
    "plan for x by auto: OPTIMAL\n  budget     56.67 MiB\n  overhead   5.33 % predicted (1.49 s against 1.41 s)\n"
)


@pytest.mark.parametrize(
    ("change", "everywhere", "of_catalogue"),
    [
        (("", ""), True, True),
        (("5.33", "5.34"), True, True),
        (("5.33", "6.33"), True, False),
        (("OPTIMAL", "FEASIBLE"), True, False),
        (("1.49 s", "149.0 ms"), True, False),
        (("56.67", "56.68"), False, False),
        (("50.00 MiB", "50.01 MiB"), True, True),
        (("80.00 MiB", "81.00 MiB"), False, False),
        (("predicted", "measured"), False, False),
    ],
)
def test_an_output_that_differs_is_seen(change: tuple[str, str], everywhere: bool, of_catalogue: bool) -> None:
    printed = SHOWN.replace(*change)
    for expected, catalogue in ((everywhere, False), (of_catalogue, True)):
        if expected:
            assert_shown(printed, SHOWN, of_catalogue=catalogue)
        else:
            with pytest.raises(AssertionError):
                assert_shown(printed, SHOWN, of_catalogue=catalogue)


def test_the_command_line_runs_as_a_module(tmp_path: Path) -> None:
    assert run([sys.executable, "-m", "ebbtide.cli", "--version"], tmp_path) == f"ebbtide {ebbtide.__version__}\n"


def test_commands_of_sh_blocks_are_tested_elsewhere() -> None:
    makefile = read(ROOT / "Makefile")
    shown = {command for block in CONSOLE for command in block.commands}
    for block in BLOCKS:
        if block.language == "sh":
            for line in block.text.splitlines():
                program, target = line.split()[:2]
                if program == "ebbtide":
                    assert line in shown, f"no console block shows {line}"
                else:
                    assert program == "make"
                    assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"there is no target {target}"


@pytest.mark.parametrize("command", ["demo", "plan", "compare", "max-batch", "doctor"])
def test_a_documented_command_has_the_options_that_are_named(command: str) -> None:
    [row] = [
        line for line in prose(ROOT / "docs" / "planning.md").splitlines() if line.startswith(f"| `ebbtide {command}")
    ]
    shown = CliRunner().invoke(app, [command, "--help"]).stdout
    for option in re.findall(r"--[a-z-]+", row):
        assert option in shown, f"ebbtide {command} has no {option}"

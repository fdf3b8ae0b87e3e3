"""Every code block of the README runs, and prints what the README shows.

1. A python block is a file, named by its first line, and is run by itself in one folder that all blocks share.
2. A console block is ``$ ebbflow ...`` with its output; an sh block holds ``make`` targets, which must exist.
3. The text block after a python block is its output. Numbers, units and statuses may differ: they are this
   machine's; every word has to be there.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbflow.cli import app

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


@dataclass(frozen=True)
class Block:
    """One fenced block of the README."""

    language: str
    text: str
    output: str = ""

    @property
    def name(self) -> str:
        return self.text.splitlines()[0].removeprefix("# ")


def blocks() -> list[Block]:
    """All blocks, outputs joined to the block before them: definition 3."""
    found: list[Block] = []
    for match in FENCE.finditer((ROOT / "README.md").read_text(encoding="utf-8")):
        language, text = match.groups()
        if language == "text":
            assert found[-1].language == "python", "an output follows the code that prints it"
            found[-1] = Block("python", found[-1].text, text)
        else:
            found.append(Block(language, text))
    return found


PYTHON = [block for block in blocks() if block.language == "python"]
CONSOLE = [block for block in blocks() if block.language == "console"]


def words(text: str) -> list[str]:
    """The lines of ``text`` without what depends on the machine: definition 3."""
    text = re.sub(r"\d[\d.]*", "#", text)
    text = re.sub(r"# (?:[KMGT]iB|B|us|ms|s)\b", "# unit", text)
    text = re.sub(r"\b(?:OPTIMAL|FEASIBLE)\b", "STATUS", text)
    text = re.sub(r"(status) .*", r"\1", text)
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
    # Which ops are rerun follows from costs; that some are listed does not.
    kept = [line.partition(" ")[0] if line.startswith(("rerun ", "peak at ")) else line for line in lines]
    return [line for index, line in enumerate(kept) if line != "rerun" or kept[index - 1] != "rerun"]


def run(command: list[str], folder: Path) -> str:
    """What ``command`` prints; it has to succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader saves the blocks."""
    path = tmp_path_factory.mktemp("readme")
    for block in PYTHON:
        (path / block.name).write_text(block.text, encoding="utf-8")
    return path


def test_blocks_are_of_kinds_that_are_tested() -> None:
    assert {block.language for block in blocks()} <= {"python", "console", "sh"}
    assert PYTHON
    assert CONSOLE
    assert all(re.fullmatch(r"\w+\.py", block.name) for block in PYTHON), "the first line names the file"


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_block_prints_what_the_readme_shows(block: Block, folder: Path) -> None:
    assert words(run([sys.executable, block.name], folder)) == words(block.output)


@pytest.mark.slow
@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: block.text.partition("\n")[0][2:])
def test_console_block_prints_what_the_readme_shows(block: Block, folder: Path) -> None:
    commands = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
    for command in commands:
        line, _, output = command.partition("\n")
        program, *arguments = shlex.split(line)
        assert program == "ebbflow"
        assert words(run([sys.executable, "-m", "ebbflow.cli", *arguments], folder)) == words(output)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for block in blocks():
        if block.language == "sh":
            for line in block.text.splitlines():
                program, target = line.split()[:2]
                assert program == "make"
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"there is no target {target}"


def test_links_lead_to_files() -> None:
    for target in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        assert target.startswith("https://") or (ROOT / target).exists(), f"{target} does not exist"


def test_documented_commands_and_options_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in ("demo", "plan", "doctor"):
        [row] = [line for line in text.splitlines() if line.startswith(f"| `ebbflow {command}")]
        shown = CliRunner().invoke(app, [command, "--help"]).stdout
        for option in re.findall(r"--[a-z-]+", row):
            assert option in shown, f"ebbflow {command} has no {option}"

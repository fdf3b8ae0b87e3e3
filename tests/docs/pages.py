"""The pages that people read, and the fenced blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDS = sorted((ROOT / "docs" / "adr").glob("*.md"))
NOTES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("**/*.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page, with the output that is shown after it."""

    page: str
    language: str
    text: str
    output: str = ""

    @property
    def name(self) -> str:
        """The file that a python block is."""
        return self.text.splitlines()[0].removeprefix("# ")

    @property
    def commands(self) -> list[str]:
        """The commands of a console block."""
        return [each.partition("\n")[0] for each in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]]


def read(page: Path) -> str:
    """The text of ``page``."""
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    """The path of ``page`` inside the repository."""
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """``page`` without its fenced blocks."""
    return FENCE.sub("", read(page))


def blocks(page: Path) -> list[Block]:
    """All blocks of ``page``, outputs joined to the block before them."""
    found: list[Block] = []
    for language, text in FENCE.findall(read(page)):
        if language == "text":
            assert found, f"{name_of(page)} shows an output before any code"
            assert found[-1].language == "python", f"{name_of(page)}: an output follows the code that prints it"
            found[-1] = Block(name_of(page), "python", found[-1].text, text)
        elif language:
            found.append(Block(name_of(page), language, text))
    return found


def all_blocks() -> list[Block]:
    """The blocks of all pages, page by page."""
    return [block for page in PAGES for block in blocks(page)]

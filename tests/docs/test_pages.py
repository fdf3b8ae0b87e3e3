"""What the pages say of themselves and of the tree holds: links, paths, the README's length, the form of records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import NOTES, PAGES, RECORDS, ROOT, all_blocks, name_of, prose, read

import ebbtide
from ebbtide.planners import planner_names

README_WORDS = 1200
PAGE_WORDS, ALL_WORDS = 2_500, 20_000
"""Of the README and of the pages in ``docs``, blocks and their output included."""
SOURCE = ROOT / "src" / "ebbtide"

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
# A path in backticks: one word that ends as a source file does. ``FILE.py`` and the like stand for the reader's own.
PATH = re.compile(r"`([\w./*-]+\.(?:py|md|toml|txt|yml))(?::\w+)?`")
DECISION = re.compile(
    r"# (\d{4}): .+\n\n> - \*\*Decision:\*\* .+\n> - \*\*Why:\*\* .+\n> - \*\*Consequence:\*\* .+\n\n## "
)

EVERYTHING = [*PAGES, *RECORDS, *NOTES]


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", EVERYTHING, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in LINK.findall(prose(page)):
        if target.startswith("https://"):
            continue
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{target} does not exist"
        assert there.is_relative_to(ROOT), f"{target} leaves the repository"
        assert not anchor or anchor in _anchors(there), f"{target} has no heading #{anchor}"


@pytest.mark.parametrize("page", EVERYTHING, ids=name_of)
def test_paths_in_backticks_exist(page: Path) -> None:
    """A path is given from the root, from the package, from the tests, from the benchmarks or from the page.

    What is in ``build`` is made by a command that the page names.
    """
    of_the_reader = {block.name for block in all_blocks() if block.language == "python"} | {"FILE.py"}
    roots = (ROOT, ROOT / "src", SOURCE, ROOT / "tests", ROOT / "benchmarks", page.parent)
    for path in PATH.findall(prose(page)):
        if path not in of_the_reader and not path.startswith("build/"):
            assert any(any(root.glob(path)) for root in roots), f"there is no {path}"


def test_pages_are_short_and_say_what_they_are_for() -> None:
    words = {name_of(page): len(read(page).split()) for page in PAGES if page.name != "nightly.md"}  # which is written
    assert max(words.values()) <= PAGE_WORDS, words
    assert sum(words.values()) <= ALL_WORDS, words
    assert len(prose(ROOT / "README.md").split()) <= README_WORDS
    for page in PAGES[1:]:
        opening = re.match(r"# .+\n\nAfter this page you ", read(page))
        assert opening or page.name == "nightly.md", f"{name_of(page)} says what a reader can do after it"


def test_contributing_is_read_in_one_go() -> None:
    assert len(read(ROOT / "CONTRIBUTING.md").split()) <= README_WORDS


def test_the_changelog_of_an_unreleased_version_is_short() -> None:
    unreleased = read(ROOT / "CHANGELOG.md").partition("## [Unreleased]")[2].partition("\n## [")[0]
    assert len(unreleased.splitlines()) <= 60


def _linked(page: Path) -> set[Path]:
    return {(page.parent / target).resolve() for target, _ in LINK.findall(prose(page)) if target.endswith(".md")}


def test_every_page_is_reached_from_the_readme() -> None:
    """In two steps at most."""
    near = _linked(ROOT / "README.md")
    assert near.union(*(_linked(page) for page in near if page in PAGES)) >= set(PAGES[1:])


def test_every_page_has_a_place_on_the_site() -> None:
    """`make docs` fails on one that has none."""
    site = ROOT / "docs" / "site"
    listed = re.findall(r"^(\.\./[\w/.*]+)$", read(site / "index.md"), re.MULTILINE)
    places = {path.resolve() for each in listed for path in site.glob(f"{each}.md")}
    assert set(PAGES) <= places


@pytest.mark.parametrize("record", RECORDS, ids=name_of)
def test_a_record_opens_with_its_decision(record: Path) -> None:
    opening = DECISION.match(read(record))
    assert opening is not None, "a title, then Decision, Why and Consequence in a line each, then sections"
    assert record.name.startswith(opening[1])


def test_records_are_numbered_without_gaps_and_few() -> None:
    assert [record.name[:4] for record in RECORDS] == [f"{number:04d}" for number in range(1, len(RECORDS) + 1)]
    assert len(RECORDS) <= 30, "join records of one topic, and mark what is superseded"


def test_the_layout_has_a_row_for_every_folder_and_module() -> None:
    rows = re.findall(r"^\| (`.+?`) \|", prose(ROOT / "docs" / "architecture.md"), re.MULTILINE)
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    there = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there <= named


def test_every_planner_has_a_row() -> None:
    rows = [line for line in prose(ROOT / "docs" / "planners.md").splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named >= set(planner_names())


def test_every_error_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", prose(ROOT / "docs" / "errors.md"), re.MULTILINE)
    assert {*rows, "EbbtideError"} >= set(ebbtide.errors.__all__)

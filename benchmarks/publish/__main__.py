"""Write the pages that show results, or say what a release has not measured again.

    python -m publish            write benchmarks.md, papers.md, their plots and a table of every result to build/pages,
                                 and the picture of docs/budgets.md
    python -m publish --release  write nothing; exit with 1 where a result was not made with this version, or is stale

Run in the folder benchmarks, as ``make pages`` and ``make release-check`` do. Neither needs torch or git.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from harness.origin import BENCHMARKS, version_now
from harness.record import Record
from publish import benchmarks_page, papers_page
from publish.figures import WHICH_BUDGET
from publish.results import RESULTS, Result, all_results

PAGES = BENCHMARKS.parent / "build" / "pages"
GUIDE = BENCHMARKS.parent / "docs" / "which-budget.svg"


def pages(results: list[Result]) -> dict[str, str]:
    """Every file that is made of results, by its path in the folder of pages."""
    tables = {
        f"results/{path.relative_to(RESULTS).with_suffix('.md')}": Record.read(path).markdown()
        for path in sorted([*RESULTS.glob("*.json"), *RESULTS.glob("gpu/*.json")])
        if not path.stem.startswith("torch-")
    }
    plots = {f"plots/{name}.svg": svg for name, svg in benchmarks_page.plots(results).items()}
    return {"benchmarks.md": benchmarks_page.page(results), "papers.md": papers_page.page(results), **tables, **plots}


def write(files: dict[str, str], folder: Path = PAGES) -> None:
    """Write ``files`` into ``folder``, and remove all that was there."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def write_guide(files: dict[str, str], page: Path = GUIDE) -> None:
    """Write the picture of a page of the documentation, which is kept with it."""
    page.write_text(files[f"plots/{WHICH_BUDGET}.svg"], encoding="utf-8")


def to_measure_again(results: list[Result]) -> list[str]:
    """What keeps a release from being made with these results."""
    older = [each for each in results if each.versions != [version_now()]]
    stale = [each for each in results if each.is_stale and each not in older]
    return [
        *(f"{each.name} was made with {', '.join(each.versions)}, not with {version_now()}" for each in older),
        *(f"{each.name} is stale: its latest sample came out otherwise" for each in stale),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="store_true", help="say what a release has to measure again")
    options = parser.parse_args()
    results = all_results()
    if not options.release:
        made = pages(results)
        write(made)
        write_guide(made)
        print(PAGES / "benchmarks.md")
        return 0
    problems = to_measure_again(results)
    print("\n".join(problems) or f"every result was made with {version_now()}, and no sample contradicts one")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

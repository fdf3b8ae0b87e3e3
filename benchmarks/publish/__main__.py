"""Write the pages that are made of result files, or say what is wrong with them.

    python -m publish            write docs/benchmarks.md, docs/papers.md and docs/plots
    python -m publish --check    exit with 1 where one of these is not what the result files give
    python -m publish --release  likewise, and where a result is stale: what a release must pass

Run in the folder benchmarks, as ``make pages`` and ``make release-check`` do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness import checked
from harness.origin import BENCHMARKS
from publish import benchmarks_page, papers_page
from publish.results import Result, all_results

DOCS = BENCHMARKS.parent / "docs"


def written(results: list[Result], docs: Path = DOCS) -> dict[Path, str]:
    """Every file that is made of results, with its text."""
    files = {
        docs / "benchmarks.md": benchmarks_page.page(results, checked.read()),
        docs / "papers.md": papers_page.page(results),
    }
    return files | {docs / "plots" / f"{name}.svg": svg for name, svg in benchmarks_page.plots(results).items()}


def wrong(files: dict[Path, str], docs: Path = DOCS) -> list[str]:
    """What is missing, what has another text, and plots that nothing makes."""
    found = [
        path.relative_to(docs).as_posix()
        for path, text in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    return found + [path.relative_to(docs).as_posix() for path in (docs / "plots").glob("*.svg") if path not in files]


def _changed(result: Result) -> str:
    parts = dict.fromkeys(part for changed in result.stale_cases.values() for part in changed)
    return f"changed since: {', '.join(parts)}" if parts else "its sources were not recorded"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page differs")
    parser.add_argument("--release", action="store_true", help="likewise, and fail where a result is stale")
    options = parser.parse_args()
    results = all_results()
    files = written(results)
    if not (options.check or options.release):
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for name in wrong(files):
            (DOCS / name).unlink()
        return 0
    problems = [f"docs/{name} is not what the result files give: run make pages" for name in wrong(files)]
    if options.release:
        problems += [
            f"{each.name} is stale, run its benchmark again: {_changed(each)}" for each in results if each.is_stale
        ]
    print("\n".join(problems) or "all pages are those of the result files")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Everything, with the long tests, all situations, the gallery and the wheel's demo: ``make nightly``.

    python tests/nightly.py [--again] [--only PART ...] [--page FILE]

1. A *part* is a command: a make target, or the tests of a folder, long ones included.
2. A part that ended is remembered in ``build/nightly.json`` with what came of it, for the sources as they are; a run
   that was cut off goes on with the parts that are left. Other sources begin anew, as does ``--again``.
3. After every part ``docs/nightly.md`` says what is known: the date, the version, counts per part, what failed and
   what was not run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
STATE = BUILD / "nightly.json"
PAGE = ROOT / "docs" / "nightly.md"
TARGETS = ("lint", "types", "docs", "wheel")
PYTEST = ("-q", "--numprocesses=auto", "--maxprocesses=4", "--dist=worksteal", "--hypothesis-profile=nightly")
SOURCES = ("src", "published", "tests", "benchmarks", "docs")
SUFFIXES = (".py", ".toml", ".c", ".md")
NAMED = 40
"""Tests that failed, on the page."""


def parts() -> dict[str, list[str]]:
    """The command of every part."""
    found = {target: ["make", target] for target in TARGETS}
    for folder in _test_folders():
        name = folder.relative_to(ROOT).as_posix()
        found[name] = [sys.executable, "-m", "pytest", *PYTEST, name]
    return found


def _test_folders() -> Iterator[Path]:
    """Folders directly below those that pytest is told of, and those themselves where they have tests."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for top in settings["tool"]["pytest"]["ini_options"]["testpaths"]:
        nested = [path for path in sorted((ROOT / top).iterdir()) if path.is_dir() and any(path.rglob("test_*.py"))]
        yield from [ROOT / top] if any((ROOT / top).glob("test_*.py")) else nested


def run_part(name: str, command: Sequence[str]) -> dict[str, Any]:
    """Run ``command``; of tests, with their counts and the names of those that failed."""
    report = BUILD / "nightly" / f"{name.replace('/', '-')}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    tests = command[0] != "make"
    begin = time.monotonic()
    done = subprocess.run([*command, *([f"--junitxml={report}"] if tests else [])], cwd=ROOT, check=False)
    found: dict[str, Any] = {"code": done.returncode, "seconds": round(time.monotonic() - begin)}
    return found | (counts(report) if tests and report.exists() else {})


def counts(report: Path) -> dict[str, Any]:
    """How many tests of a JUnit report there are, were skipped and failed, and the names of the latter."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [each for each in cases if each.find("failure") is not None or each.find("error") is not None]
    skipped = sum(each.find("skipped") is not None for each in cases)
    names = sorted(f"{each.get('classname', '').replace('.', '/')}.py::{each.get('name')}" for each in failed)
    return {"tests": len(cases), "skipped": skipped, "failed": names}


def fingerprint() -> str:
    """Of all that a part may run or read, but the page that is written."""
    digest = hashlib.sha256()
    files = [path for top in SOURCES for path in (ROOT / top).rglob("*") if path.suffix in SUFFIXES and path != PAGE]
    for path in sorted([*files, ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / "Makefile"]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def page(results: Mapping[str, Mapping[str, Any]], names: Sequence[str], facts: Mapping[str, str]) -> str:
    """What is known of the parts ``names``, as ``docs/nightly.md`` has it."""
    run = {name: results[name] for name in names if name in results}
    left = [name for name in names if name not in results]
    wrong = [name for name, each in run.items() if each["code"]]
    verdict = f"Failed: {', '.join(wrong)}." if wrong else "Nothing failed." if run else "Nothing was run."
    lines = [
        "# The last nightly run",
        "",
        "`make nightly` runs all there is: the long tests, every training situation, the gallery and the wheel's demo.",
        "",
        f"{', '.join(f'{what} {value}' for what, value in facts.items())}. {verdict}",
        "",
        "| part | tests | failed | skipped | seconds |",
        "|---|---|---|---|---|",
    ]
    for name, each in run.items():
        failed = len(each["failed"]) if "failed" in each else int(each["code"] != 0)
        lines.append(f"| {name} | {each.get('tests', '')} | {failed} | {each.get('skipped', '')} | {each['seconds']} |")
    if left:
        lines += ["", f"Not run: {', '.join(left)}."]
    failed_tests = [test for each in run.values() for test in each.get("failed", ())]
    if failed_tests:
        more = len(failed_tests) - NAMED
        lines += ["", "Tests that failed:", "", *(f"- `{test}`" for test in failed_tests[:NAMED])]
        lines += [f"- and {more} more"] if more > 0 else []
    return "\n".join(lines) + "\n"


def _facts() -> dict[str, str]:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    commit = {"commit": done.stdout.strip()} if done.returncode == 0 else {}
    return {
        "Date": f"{datetime.now(UTC):%Y-%m-%d}",
        "version": version("ebbtide"),
        **commit,
        "Python": platform.python_version(),
        "torch": version("torch"),
        "cores": str(os.cpu_count()),
    }


def known_results(sources: str, path: Path = STATE) -> dict[str, dict[str, Any]]:
    """Results of an earlier run of the same sources."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return dict(state["results"]) if state.get("sources") == sources else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="also parts that have a result of the same sources")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts by their names")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the summary is written")
    options = parser.parse_args()
    sources, commands, facts = fingerprint(), parts(), _facts()
    results = {} if options.again else known_results(sources)
    for name, command in commands.items():
        if name in results or (options.only and name not in options.only):
            continue
        print(f"-- {name}", flush=True)
        results[name] = run_part(name, command)
        STATE.parent.mkdir(exist_ok=True)
        STATE.write_text(json.dumps({"sources": sources, "results": results}, indent=1), encoding="utf-8")
        options.page.write_text(page(results, list(commands), facts), encoding="utf-8")
    options.page.write_text(page(results, list(commands), facts), encoding="utf-8")
    print(options.page.read_text(encoding="utf-8"))
    return int(any(each["code"] for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())

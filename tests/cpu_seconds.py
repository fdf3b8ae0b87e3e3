"""CPU seconds of every test, those of the processes that it starts included: ``make durations``.

A pytest plugin (``-p cpu_seconds``, with ``tests`` on the path). Each process of a run appends its lines to the file
that ``--cpu-seconds`` names; unlike wall-clock durations they say the same on a busy machine. Called with such files
it prints the whole, each folder's part and the tests that take longest.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

LISTED = 100


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", type=Path, metavar="FILE", help="append each test's CPU seconds to FILE")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Append a line for ``item``: its fixtures are within, those of its file are with the first who asks for them."""
    before = _cpu_seconds()
    answer = yield
    path = item.config.getoption("--cpu-seconds")
    if path is not None:
        line = json.dumps({"test": item.nodeid, "seconds": round(_cpu_seconds() - before, 3)})
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    return answer


def _cpu_seconds() -> float:
    """Of this process, all of its threads, and its children that have ended."""
    return sum(os.times()[:4])


def main(paths: list[str]) -> None:
    """Print what the files at ``paths`` hold."""
    seconds: dict[str, float] = {}
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            seconds[entry["test"]] = entry["seconds"]
    folders: dict[str, list[float]] = defaultdict(list)
    for test, taken in seconds.items():
        folders[test.partition("::")[0].rpartition("/")[0]].append(taken)
    print(f"{sum(seconds.values()):8.0f} s CPU  {len(seconds)} tests")
    for folder, each in sorted(folders.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(each):8.0f} s CPU  {len(each)} tests  {folder}")
    print()
    for test, taken in sorted(seconds.items(), key=lambda item: -item[1])[:LISTED]:
        print(f"{taken:8.1f} s CPU  {test}")


if __name__ == "__main__":
    main(sys.argv[1:])

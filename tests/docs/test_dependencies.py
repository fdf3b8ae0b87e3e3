"""What ``pyproject.toml`` asks users to install is what the sources import."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT, PUBLISHED = (
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for folder in ("", "published")
)

COME_ALONG = {"sympy", "llvmlite"}
"""Parts of torch's and numba's own interfaces: torch hands out sympy's symbols, numba takes llvmlite's."""


@functools.cache
def _imported() -> frozenset[str]:
    """Top-level names that any source file imports, wherever in it."""
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return frozenset(found)


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0].lower()


@pytest.mark.parametrize("requirement", PROJECT["dependencies"])
def test_a_core_dependency_is_imported(requirement: str) -> None:
    assert _name(requirement) in _imported()


def test_every_requirement_has_its_exact_version_in_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_name(line) for line in lines if "==" in line}
    lists = [
        each for one in (PROJECT, PUBLISHED) for each in (one["dependencies"], *one["optional-dependencies"].values())
    ]
    needed = [requirement for requirements in lists for requirement in requirements]
    missing = {_name(each).replace("-", "_") for each in needed} - {each.replace("-", "_") for each in pinned}
    assert missing <= {"ebbtide"}, f"constraints.txt lacks {missing}"


def test_the_site_is_built_with_what_its_extra_names() -> None:
    [line] = re.findall(r"pip install .* sphinx.*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert line.split()[-3:] == PROJECT["optional-dependencies"]["docs"]


def test_what_is_imported_is_declared() -> None:
    extras = PROJECT["optional-dependencies"]
    declared = {_name(each) for each in [*PROJECT["dependencies"], *(r for rs in extras.values() for r in rs)]}
    known = {"ebbtide", "", *sys.stdlib_module_names}
    assert _imported() - known - COME_ALONG <= declared

"""Imports go one way: each folder knows those below it, and the lower half knows no torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ebbtide

ROOT = Path(ebbtide.__file__).parent

LAYERS = [
    {
        "errors",
        "faults",
        "signals",
        "children",
        "deferred_queue",
        "units",
        "names",
        "files",
        "case",
        "tiers",
        "version",
        "checks",
        "user_objects",
    },
    {"step"},
    {"planners"},
    {"report"},
    {"options", "entry_points"},
    {"planning"},
    {"torch_seams"},
    {"measurement"},
    {"transfers"},
    {"cost"},
    {"capture"},
    {"optimizer"},
    {"rewrites"},
    {"lower"},
    {"ranks"},
    {"engine"},
    {"_api"},
    {"integrations"},
    {"zoo"},
    {"demo"},
    {"cli"},
]
"""From the bottom up; what stands on one line is a layer, and a module imports from its own and from lower ones."""

NO_TORCH = {
    "errors",
    "faults",
    "signals",
    "children",
    "deferred_queue",
    "units",
    "names",
    "files",
    "tiers",
    "version",
    "checks",
    "user_objects",
    "step",
    "planners",
    "planning",
    "report",
}
"""A program is plain data: it is planned, judged and fuzzed without torch."""


def _rank(name: str) -> int:
    return next(rank for rank, layer in enumerate(LAYERS) if name in layer)


def _name(path: Path) -> str:
    """The layer's part that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere, functions and type-checking blocks included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            found.update({node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found


def import_graph() -> dict[str, set[str]]:
    """Per module, the others of the library that it imports."""
    paths = {".".join(("ebbtide", *path.relative_to(ROOT).with_suffix("").parts)): path for path in _files()}
    modules = {name.removesuffix(".__init__"): imported(path) for name, path in paths.items()}
    return {name: {each for each in found if each in modules and each != name} for name, found in modules.items()}


def by_folder(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same for the folders and files right under ``ebbtide``."""
    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        own = name.split(".")[1]
        found.setdefault(own, set()).update(each.split(".")[1] for each in others if each.split(".")[1] != own)
    return found


def circles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Sets of nodes that all reach one another, sorted."""
    reached = {name: set(others) for name, others in graph.items()}
    for middle in graph:
        for others in reached.values():
            if middle in others:
                others |= reached[middle]
    return sorted(
        {
            tuple(sorted(each for each in others if name in reached[each]))
            for name, others in reached.items()
            if name in others
        }
    )


def upward() -> list[str]:
    """Imports of a higher layer than the importing module's own."""
    return [
        f"{name} imports {other}"
        for name, others in import_graph().items()
        for other in others
        if _rank(other.split(".")[1]) > _rank(name.split(".")[1])
    ]


def test_the_layers_are_those_that_there_are() -> None:
    there = {_name(path) for path in _files()}
    assert {name for layer in LAYERS for name in layer} == there
    assert there >= NO_TORCH


def test_a_module_imports_its_own_layer_and_lower_ones() -> None:
    assert upward() == []


def test_no_imports_form_a_circle() -> None:
    graph = import_graph()
    assert circles(graph) == []
    assert circles(by_folder(graph)) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"e"}, "e": {"d", "a"}}) == [("b", "c"), ("d", "e")]


@pytest.mark.parametrize(
    "path", [path for path in _files() if _name(path) in NO_TORCH], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_program_is_planned_without_torch(path: Path) -> None:
    assert not {each.partition(".")[0] for each in imported(path)} & {"torch"}


def test_the_engine_says_what_each_of_its_modules_is_for() -> None:
    there = {path.stem for path in (ROOT / "engine").glob("*.py")} - {"__init__"}
    named = set(re.findall(r"``(\w+)``", (ROOT / "engine" / "__init__.py").read_text(encoding="utf-8")))
    assert there == named

"""Imports go one way: each folder knows those below it, and the lower half knows no torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ebbtide

ROOT = Path(ebbtide.__file__).parent

LAYERS = [
    {"errors", "faults", "signals", "turns", "units", "names", "files", "case", "tiers", "clipping"},
    {"step"},
    {"planners"},
    {"options"},
    {"planning"},
    {"report"},
    {"torch_seams"},
    {"measurement"},
    {"transfers"},
    {"cost"},
    {"capture"},
    {"inside"},
    {"rewrites"},
    {"lower"},
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
    "turns",
    "units",
    "names",
    "files",
    "tiers",
    "clipping",
    "step",
    "planners",
    "planning",
    "report",
}
"""A program is plain data: it is planned, judged and fuzzed without torch."""

LATE = {
    ("step/plan.py", "ebbtide.report.text.explain"): "a plan's text belongs to the renderers; it is asked for by name",
    ("step/plan.py", "ebbtide.report.text.plan"): "likewise",
    ("planning/frontier.py", "ebbtide.report.text.compare"): "likewise, of several plans",
    ("step/plan.py", "ebbtide.report.html.plan"): "likewise",
    ("step/plan.py", "ebbtide.report.html.page"): "likewise",
    ("step/plan.py", "ebbtide.report.records.page"): "likewise",
    ("step/plan.py", "ebbtide.report.records.points"): "likewise",
    ("step/plan.py", "ebbtide.report.traces.chrome"): "likewise",
    ("step/plan.py", "ebbtide.report.traces.snapshot"): "likewise",
    ("step/plan.py", "ebbtide.report.plots.plan"): "likewise",
}
"""Imports inside functions that go up on purpose."""


def _rank(name: str) -> int:
    return next(rank for rank, layer in enumerate(LAYERS) if name in layer)


def _files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def _imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere, functions and type-checking blocks included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            found.add(node.module or "")
    return found


def test_the_layers_are_those_that_there_are() -> None:
    there = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in _files()}
    assert {name for layer in LAYERS for name in layer} == there
    assert there >= NO_TORCH
    for name, _ in LATE:
        assert (ROOT / name).exists(), f"{name} is gone"


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_its_own_layer_and_lower_ones(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    own = name.partition("/")[0].removesuffix(".py")
    for module in _imported(path):
        head, _, rest = module.partition(".")
        if own in NO_TORCH:
            assert head != "torch", f"{name} imports {module}"
        if head == "ebbtide" and rest and (name, module) not in LATE:
            other = rest.partition(".")[0]
            assert _rank(other) <= _rank(own), f"{name} imports {module}"

"""The core knows no torch: a program is plain data, so planners run and are fuzzed without it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ebbflow.program

ROOT = Path(ebbflow.program.__file__).parent
CORE = ["program", "program_graph", "schedule", "machine", "simulate", "legality", "plan", "units", "errors"]
CORE += ["advice", "explain", "flat", "findings", "moment", "names", "files", "plan_cache", "buckets"]
FILES = [ROOT / f"{name}.py" for name in CORE if (ROOT / f"{name}.py").exists()]
FILES += sorted((ROOT / "planners").glob("*.py"))
# What the core may import of ebbflow, besides itself.
ALLOWED = {*CORE, "planners"}


def imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere, functions and type-checking blocks included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_core_imports_no_torch_and_nothing_that_does(path: Path) -> None:
    for module in imported(path):
        head, _, rest = module.partition(".")
        assert head != "torch", f"{path.name} imports {module}"
        if head == "ebbflow":
            assert rest.partition(".")[0] in ALLOWED, f"{path.name} imports {module}"

"""Which modules import which: cycles, and imports that go up in the order of folders that the layer test holds.

1. A *cycle* is a set of modules each of which reaches every other by imports that run when a module is imported:
   those at module level, type-checking blocks left out, since they never run.
2. The *order* is ``LAYERS`` of ``tests/core/test_layers.py``, the one place that has it. An import is *upward* if it
   goes to a later layer, wherever in the file it stands; those that the test allows by name are not counted.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness.record import Row, at_most

__all__ = ["cycles", "import_graph", "rows", "upward"]

TITLE = "Imports between the modules of src/ebbtide"
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "ebbtide"


def rows() -> Iterator[Row]:
    graph = import_graph(PACKAGE)
    circles, up = cycles(graph), upward()
    columns = {
        "case": "imports",
        "modules": len(graph),
        "imports": sum(map(len, graph.values())),
        "cycles": "; ".join(" <-> ".join(circle) for circle in circles),
        "upward": "; ".join(up),
    }
    yield Row("imports", columns, (at_most("cycles", len(circles), 0), at_most("upward imports", len(up), 0)))


def import_graph(package: Path) -> dict[str, set[str]]:
    """Per module, the modules of the same package that it imports when it is imported itself."""
    names = {_name(path, package): path for path in sorted(package.rglob("*.py"))}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found: set[str] = set()
        for node in _at_import(ast.parse(path.read_text(encoding="utf-8")).body):
            found.update(each for each in _targets(node, names) if each != name)
        graph[name] = found
    return graph


def _name(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _at_import(body: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that run with their module (definition 1)."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from _at_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _at_import(each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt))


def _targets(node: ast.Import | ast.ImportFrom, known: Iterable[str]) -> Iterator[str]:
    """The known modules that a statement names: a submodule where there is one, else what it is imported from."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
        return
    home = node.module or ""
    for alias in node.names:
        inner = f"{home}.{alias.name}"
        if inner in known or home in known:
            yield inner if inner in known else home


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other around, sorted (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return sorted(found)


def upward() -> list[str]:
    """Imports that go up (definition 2)."""
    order = _layer_test()
    rank = {name: at for at, layer in enumerate(order.LAYERS) for name in layer}
    found: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        own = name.partition("/")[0].removesuffix(".py")
        if name == "__init__.py":
            continue  # the public page, which imports from everywhere on first use
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            else:
                continue
            inner = [each for each in modules if each.startswith("ebbtide.") and (name, each) not in order.LATE]
            found += [f"{name} -> {each}" for each in inner if rank[each.split(".")[1]] > rank[own]]
    return found


def _layer_test() -> Any:
    spec = importlib.util.spec_from_file_location("layers", ROOT / "tests" / "core" / "test_layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""Which modules import which: circles of modules and of folders, and imports that go up.

An import counts wherever it stands, in functions and type-checking blocks too. The layers, and what counts as a circle,
are those of ``tests/core/test_layers.py``: one place has them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.record import Row, at_most

__all__ = ["rows"]

TITLE = "Imports between the modules of src/ebbtide"
LAYERS_TEST = Path(__file__).resolve().parents[2] / "tests" / "core" / "test_layers.py"


def rows() -> Iterator[Row]:
    layers = _layers_test()
    graph = layers.import_graph()
    circles, up = layers.circles(graph) + layers.circles(layers.by_folder(graph)), layers.upward()
    columns = {
        "case": "imports",
        "modules": len(graph),
        "imports": sum(map(len, graph.values())),
        "layers": len(layers.LAYERS),
        "circles": "; ".join(" <-> ".join(circle) for circle in circles),
        "upward": "; ".join(up),
    }
    yield Row("imports", columns, (at_most("circles", len(circles), 0), at_most("upward imports", len(up), 0)))


def _layers_test() -> Any:
    spec = importlib.util.spec_from_file_location("layers", LAYERS_TEST)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""What this package declares is what it has, and what the library says that it brings."""

from __future__ import annotations

import ast
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import ebbtide_published
from ebbtide.names import PUBLISHED_PLANNERS, PUBLISHED_ZOO, ZOO, ZOO_GROUP, brought, zoo_names
from ebbtide.planners.registry import GROUP, HOMES, missing_package, planner_named, planner_names

ROOT = Path(ebbtide_published.__file__).parent
DECLARED = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]


def registered() -> dict[str, str]:
    """Per name given to ``@planner`` in a source file of the package, its module."""
    found: dict[str, str] = {}
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(("ebbtide_published", *path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for call in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "planner":
                    assert isinstance(call.args[0], ast.Constant)
                    found[str(call.args[0].value)] = module
    return found


def test_every_planner_is_an_entry_point() -> None:
    assert DECLARED[GROUP] == registered()
    assert sorted(PUBLISHED_PLANNERS) == sorted(registered())
    assert not set(HOMES) & set(registered())


def test_every_model_is_an_entry_point() -> None:
    assert set(DECLARED[ZOO_GROUP]) == set(PUBLISHED_ZOO)
    assert not set(ZOO) & set(PUBLISHED_ZOO)


@pytest.mark.parametrize("group", [GROUP, ZOO_GROUP])
def test_what_is_installed_here_is_what_is_declared(group: str) -> None:
    assert DECLARED[group].items() <= brought(group).items(), "install it anew: pip install -e ./published"


@pytest.mark.parametrize("name", sorted(DECLARED[GROUP]))
def test_a_planner_is_found_by_its_name(name: str) -> None:
    assert name in planner_names()
    if not missing_package(name):
        assert callable(planner_named(name))


@pytest.mark.parametrize("name", sorted(DECLARED[ZOO_GROUP]))
def test_a_model_is_found_by_its_name(name: str) -> None:
    assert name in zoo_names()
    module, _, function = DECLARED[ZOO_GROUP][name].partition(":")
    assert callable(getattr(import_module(module), function))

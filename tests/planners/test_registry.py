"""The registry knows where each planner is, without importing any; what is heavy is loaded when planning starts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide.planners
from ebbtide import names
from ebbtide.errors import UsageError
from ebbtide.names import PUBLISHED_PLANNERS
from ebbtide.options import Options
from ebbtide.planners import planner_named, planner_names, registry
from ebbtide.planners.registry import GROUP, HOMES

ROOT = Path(ebbtide.planners.__file__).parent
HEAVY = ("numba", "llvmlite", "highspy", "ortools")


def registered() -> dict[str, str]:
    """Per name given to ``@planner`` in a source file of the package, its module."""
    found: dict[str, str] = {}
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(("ebbtide.planners", *path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for call in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "planner":
                    assert isinstance(call.args[0], ast.Constant), f"{module}: {node.name} has no literal name"
                    name = str(call.args[0].value)
                    assert name not in found, f"two planners are named {name}"
                    found[name] = module
    return found


def test_every_planner_has_its_line_in_homes() -> None:
    assert registered() == HOMES, "add a line to HOMES in planners/registry.py for each @planner"
    assert list(HOMES) == sorted(HOMES)


@pytest.mark.parametrize("name", sorted(HOMES))
def test_a_planner_is_found_where_homes_says(name: str) -> None:
    assert name in planner_names()
    assert callable(planner_named(name))


def loaded_by(statement: str) -> set[str]:
    """Which heavy modules a fresh interpreter has after ``statement``."""
    code = f"import sys\n{statement}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import ebbtide.planners; ebbtide.planners.planner_names()",
        "from ebbtide.planners.registry import require_planner; require_planner('auto')",
        "import ebbtide.planning.frontier, ebbtide.planning.shape_plans, ebbtide.step.plan, ebbtide.report.text.plan",
        pytest.param("import ebbtide; [getattr(ebbtide, name) for name in ebbtide.__all__]", marks=pytest.mark.slow),
    ],
    ids=["planners", "a name checked", "planning", "every public name"],
)
def test_nothing_heavy_is_loaded_before_planning_starts(statement: str) -> None:
    assert loaded_by(statement) == set()


def test_a_planner_loads_what_it_needs() -> None:
    """The check above can fail."""
    assert "numba" in loaded_by("from ebbtide.planners import planner_named; planner_named('greedy')")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no other package brings anything."""
    for module in (registry, names):
        monkeypatch.setattr(module, "brought", lambda group: {})
    monkeypatch.setattr(registry, "_REGISTRY", {name: lambda problem: None for name in HOMES})


@pytest.mark.usefixtures("alone")
def test_without_the_published_planners_it_is_said_how_to_install_them() -> None:
    assert planner_names() == sorted(HOMES)
    for name in PUBLISHED_PLANNERS:
        with pytest.raises(UsageError, match=r"one of the published planners.*a checkout.*pip install \./published"):
            Options(planner=name)
    with pytest.raises(UsageError, match=r"did you mean 'swap'\? accepted: .*greedy, keep_all, least_memory"):
        planner_named("swop")


def test_another_package_brings_a_planner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "brought_here.py").write_text(
        "from ebbtide.planners.keep_all import keep_all\n"
        "from ebbtide.planners.registry import planner\n"
        "planner('brought', moves=True, needs_tiers=True)(keep_all)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "brought", lambda group: {"brought": "brought_here"} if group == GROUP else {})
    for table in ("_REGISTRY", "_MOVE", "_NEED_TIERS"):
        monkeypatch.setattr(registry, table, getattr(registry, table).copy())
    assert "brought" in planner_names()
    assert planner_named("brought") is planner_named("keep_all")
    assert registry.moves_buffers("brought")
    with pytest.raises(UsageError, match="planner 'brought' moves buffers and needs a tier"):
        Options(planner="brought").require_complete()

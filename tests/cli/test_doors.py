"""What a step may be asked to do comes through every door that plans: clipping, and sums in another order."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ebbtide
from ebbtide.case import Case
from ebbtide.cli import app
from ebbtide.errors import UsageError
from ebbtide.zoo import mlp_chain
from head_models import FORMS, arguments

CASE = """
import sys
sys.path.insert(0, {tests!r})
from ebbtide.case import Case
from head_models import FORMS, arguments


def tower(batch: int = 8) -> Case:
    return Case(FORMS["plain"](), tuple(each.repeat(batch // 8 or 1, 1)[:batch] for each in arguments()))
"""
CHAIN = ("zoo:mlp_chain", "--size", 8, "--layers", 6)
INSIDE = ("--optimizer", "adamw", "--step", "inside")
LITTLE = ("--effort", 50)
FEW = "200KiB"
"""Of a chain of two layers with the state of AdamW: few batches are captured until the largest is known."""


def run(*given: object) -> Any:
    result = CliRunner().invoke(app, [str(each) for each in given])
    assert result.exit_code == 0, result.output
    return result


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


DOORS: dict[str, Callable[..., Any]] = {
    "plan": lambda case, **asked: ebbtide.plan(
        case.model, case.args, budget="100%", options=ebbtide.Options(optimizer=adamw, **asked)
    ),
    "sweep": lambda case, **asked: ebbtide.sweep(
        case.model, case.args, budgets=["100%"], options=ebbtide.Options(optimizer=adamw, **asked)
    )[0],
    "max_batch": lambda case, **asked: (
        ebbtide.max_batch(
            functools.partial(mlp_chain, layers=2), budget=FEW, options=ebbtide.Options(optimizer=adamw, **asked)
        ).plan
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_functions_take_a_norm(door: str) -> None:
    case = mlp_chain(8, layers=6)
    asked: dict[str, Any] = {"step": "inside", "effort": 50, "progress": None}
    plan = DOORS[door](case, **asked, max_norm=1.0)
    assert any("total_norm" in op.name for op in plan.program.ops)
    assert not any("total_norm" in op.name for op in DOORS[door](case, **asked).program.ops)


def test_findings_and_cases_take_one_too() -> None:
    case = mlp_chain(8, layers=6)
    asked: dict[str, Any] = {"step": "inside", "effort": 50, "progress": None}
    plain, clipped = (
        ebbtide.doctor(case.model, case.args, options=ebbtide.Options(optimizer=adamw, **asked, **more))
        for more in ({}, {"max_norm": 1.0})
    )
    assert clipped.floor_bytes >= plain.floor_bytes

    def make(batch: int) -> Case:
        made = mlp_chain(batch, layers=2)
        return Case(made.model, made.args, optimizer=adamw(made.model), step="inside", max_norm=1.0)

    found = ebbtide.max_batch(make, budget=FEW, options=ebbtide.Options(effort=50, progress=None))
    assert any("total_norm" in op.name for op in found.plan.program.ops)


def test_commands_take_one() -> None:
    more = ("--max-norm", 1)
    run("plan", *CHAIN, "--budget", "100%", *INSIDE, *more, *LITTLE)
    run("doctor", *CHAIN, *INSIDE, *more, *LITTLE)
    run("compare", *CHAIN, "--budgets", "100%", "--planners", "auto", *INSIDE, *more, *LITTLE)
    run("max-batch", "zoo:mlp_chain", "--layers", 2, "--budget", FEW, *INSIDE, *more, *LITTLE)


def test_commands_say_that_it_needs_the_optimizer_inside() -> None:
    result = CliRunner().invoke(app, [str(each) for each in ("plan", *CHAIN, "--budget", "100%", "--max-norm", 1)])
    assert result.exit_code != 0
    assert "--step inside" in str(result.exception) + result.output


@pytest.fixture
def tower(tmp_path: Path) -> str:
    path = tmp_path / "towers.py"
    path.write_text(CASE.format(tests=str(Path(__file__).parents[1])))
    return f"{path}:tower"


def test_rewrites_come_through_every_door(tower: str) -> None:
    rewrites = ("--rewrites", "all", *LITTLE)
    plan = json.loads(run("plan", tower, "--budget", "40%", *rewrites, "--json").stdout.strip().splitlines()[-1])
    rows = json.loads(run("compare", tower, "--budgets", "40%", "--planners", "auto", *rewrites, "--json").stdout)
    assert plan["smallest_bytes"] <= plan["budget_bytes"]
    assert rows[0]["predicted_peak_bytes"] <= rows[0]["budget_bytes"]
    assert "guessed" in run("doctor", tower, *rewrites).stdout
    run("max-batch", tower, "--budget", "600KiB", *rewrites)
    plans = ebbtide.sweep(
        FORMS["plain"](),
        arguments(),
        budgets=["40%", "70%"],
        options=ebbtide.Options(rewrites="all", effort=50, progress=None),
    )
    assert plans[0].overhead >= plans[1].overhead


def test_a_case_that_ignores_its_batch_is_refused() -> None:
    fixed = mlp_chain(8, layers=2)
    with pytest.raises(UsageError, match="has to make inputs of the batch that it is given"):
        ebbtide.max_batch(lambda batch: fixed, budget="16MiB", options=ebbtide.Options(progress=None))

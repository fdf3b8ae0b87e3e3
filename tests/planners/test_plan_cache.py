"""The plan cache: found again, start points for neighbours, never trusted, never too large."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import BudgetError
from ebbtide.files import keep
from ebbtide.planners import Answer, Problem, Status
from ebbtide.planning import one_program as planning
from ebbtide.planning.asked import QUICK_EFFORT
from ebbtide.planning.cache import CachedAnswer, PlanCache
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.report.plan import Plan
from ebbtide.step.program import Program
from ebbtide.step.provenance import Planned
from ebbtide.units import Budget
from strategies import chain

PROGRAM = chain(24)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "plans"


def planned(directory: Path | None, program: Program = PROGRAM, budget: str = "50%", **options: object) -> Plan:
    cache = None if directory is None else PlanCache(directory)
    made = PlanningOptions(effort=500, cache=cache, **options)  # type: ignore[arg-type]
    return make_plan(program, Budget.parse(budget), resident_bytes=0, options=made)


def files(directory: Path) -> list[Path]:
    """Entries: a least is kept beside them for each program."""
    return sorted(each for each in directory.glob("*.json") if not each.name.startswith("least-"))


def scaled(program: Program, factor: int) -> Program:
    buffers = tuple(replace(b, bytes=b.bytes * factor) for b in program.buffers)
    return replace(program, buffers=buffers)


def test_a_plan_is_found_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned(directory)
    assert first.provenance.planned is Planned.SEARCHED

    def never(*_: object, **__: object) -> None:
        raise AssertionError("planned anew")

    monkeypatch.setattr(planning, "smallest_of", never)
    second = planned(directory)
    assert second.provenance.planned is Planned.CACHED
    assert second.schedule == first.schedule
    assert (second.status, second.bound, second.bound_class) == (first.status, first.bound, first.bound_class)
    assert (second.smallest_bytes, second.floor_bytes) == (first.smallest_bytes, first.floor_bytes)


@pytest.mark.parametrize(
    "change",
    [
        {"budget": "51%"},
        {"seed": 1},
        {"planner": "greedy"},
        {"program": PROGRAM.with_costs([2.0 * op.seconds + 1 for op in PROGRAM.ops], [0] * len(PROGRAM.ops))},
        {"program": replace(PROGRAM, held_bytes=1)},
        {"program": scaled(PROGRAM, 2)},
    ],
    ids=["budget", "seed", "planner", "costs", "held bytes", "sizes"],
)
def test_whatever_an_answer_depends_on_is_in_its_key(directory: Path, change: dict[str, object]) -> None:
    planned(directory)
    assert planned(directory, **change).provenance.planned is Planned.SEARCHED  # type: ignore[arg-type]
    assert len(files(directory)) == 2


def test_a_smaller_budgets_plan_starts_the_search(directory: Path) -> None:
    tight = planned(directory, budget="35%")
    wide = planned(directory, budget="36%", planner="greedy")
    assert wide.overhead <= tight.overhead


def test_another_size_of_the_same_structure_starts_the_search(directory: Path) -> None:
    plan = planned(directory)
    larger = scaled(PROGRAM, 3)
    near = PlanCache(directory).near(Problem(larger, 3 * (plan.budget_bytes + 1)))
    assert near == [plan.schedule]
    assert PlanCache(directory).near(Problem(chain(23), plan.budget_bytes)) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "ebbtide-plans/1"}', "[" * 100_000])
def test_a_damaged_file_is_planned_anew(directory: Path, text: str) -> None:
    first = planned(directory)
    (path,) = files(directory)
    path.write_text(text)
    second = planned(directory)
    assert second.provenance.planned is Planned.SEARCHED
    assert second.schedule == first.schedule
    assert planned(directory).provenance.planned is Planned.CACHED, "it was written anew"


@pytest.mark.parametrize("row", [["c", 10_000], ["f", 0], ["c", -1]], ids=str)
def test_an_illegal_schedule_is_planned_anew(directory: Path, row: list[object]) -> None:
    first = planned(directory)
    (path,) = files(directory)
    data = json.loads(path.read_text())
    data["schedule"].insert(1, row)
    assert keep(path, path.with_name("lock"), lambda: data)
    second = planned(directory)
    assert second.provenance.planned is Planned.SEARCHED
    assert second.schedule == first.schedule


def test_a_schedule_over_the_budget_is_planned_anew(directory: Path) -> None:
    planned(directory, budget="80%")
    planned(directory, budget="40%")
    wide, tight = sorted(files(directory), key=lambda p: -json.loads(p.read_text())["share"])
    data = json.loads(tight.read_text())
    data["schedule"] = json.loads(wide.read_text())["schedule"]
    assert keep(tight, tight.with_name("lock"), lambda: data)
    again = planned(directory, budget="40%")
    assert again.provenance.planned is Planned.SEARCHED
    assert again.predicted_peak_bytes <= again.budget_bytes


def test_another_problems_entry_under_our_name_is_not_taken(directory: Path) -> None:
    planned(directory)
    (path,) = files(directory)
    data = json.loads(path.read_text())
    data["key"]["seed"] = "7"
    assert keep(path, path.with_name("lock"), lambda: data)
    assert planned(directory).provenance.planned is Planned.SEARCHED


def test_what_a_clock_or_an_interrupt_ended_is_not_kept(directory: Path) -> None:
    problem = Problem(PROGRAM, planned(None).budget_bytes)
    schedule = planned(None).schedule
    cache = PlanCache(directory)
    cache.store("auto", problem, CachedAnswer(Answer(Status.TIME_LIMIT, schedule), 1))
    cache.store("auto", problem, CachedAnswer(Answer(Status.TIME_LIMIT, None), 1))
    assert not directory.exists()


def never(*_: object, **__: object) -> None:
    raise AssertionError("searched anew")


def test_a_refusal_is_found_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetError) as first:
        planned(directory, budget="2%")
    monkeypatch.setattr(planning, "smallest_of", never)
    monkeypatch.setattr(planning, "planner_named", never)
    with pytest.raises(BudgetError) as second:
        planned(directory, budget="2%")
    assert str(second.value) == str(first.value)
    assert second.value.smallest_bytes == first.value.smallest_bytes


def test_a_refusal_starts_no_search(directory: Path) -> None:
    with pytest.raises(BudgetError):
        planned(directory, budget="2%")
    assert PlanCache(directory).near(Problem(PROGRAM, 1)) == []
    plan = planned(directory, budget="50%")
    assert plan.predicted_peak_bytes <= plan.budget_bytes


def test_what_a_quick_search_did_not_find_is_searched_for(directory: Path) -> None:
    problem = Problem(PROGRAM, planned(None).budget_bytes, effort=QUICK_EFFORT)
    PlanCache(directory).store("auto", problem, CachedAnswer(Answer(Status.INFEASIBLE, None), None))
    options = PlanningOptions(effort=4 * QUICK_EFFORT, cache=PlanCache(directory), quick=True)
    plan = make_plan(PROGRAM, Budget.parse("50%"), resident_bytes=0, options=options)
    assert plan.predicted_peak_bytes <= plan.budget_bytes


def test_a_program_is_searched_once_for_its_smallest_budget(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned(directory, budget="50%")
    monkeypatch.setattr(planning, "smallest_of", never)
    second = planned(directory, budget="60%")
    assert second.smallest_bytes == first.smallest_bytes
    assert second.smallest_is_searched
    with pytest.raises(BudgetError) as refused:
        planned(directory, budget="2%")
    assert refused.value.smallest_bytes == first.smallest_bytes


def test_a_least_that_is_not_of_this_program_is_searched_for_anew(directory: Path) -> None:
    first = planned(directory, budget="50%")
    (path,) = directory.glob("least-*.json")
    data = json.loads(path.read_text())
    data["schedule"].insert(1, ["c", 10_000])
    assert keep(path, path.with_name("lock"), lambda: data)
    assert planned(directory, budget="60%").smallest_bytes == first.smallest_bytes


def test_what_was_used_longest_ago_goes_first(directory: Path) -> None:
    plans = [planned(directory, budget=f"{share}%") for share in (80, 70, 60)]
    size = max(path.stat().st_size for path in files(directory))
    for age, path in enumerate(files(directory)):
        os.utime(path, (1000 + age, 1000 + age))
    (least,) = directory.glob("least-*.json")
    used = PlanCache(directory, most_bytes=3 * size + least.stat().st_size)
    problem = Problem(PROGRAM, plans[0].budget_bytes, effort=500)
    assert used.load("auto", problem) is not None  # now the youngest
    before = set(files(directory))
    other = Problem(PROGRAM, plans[0].budget_bytes, effort=501)
    used.store("auto", other, CachedAnswer(Answer(Status.FEASIBLE, plans[0].schedule), 1))
    gone = before - set(files(directory))
    assert len(gone) == 1
    assert used.load("auto", problem) is not None
    assert used.load("auto", other) is not None


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    plan = planned(tmp_path / "file" / "below")
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.slow
def test_a_second_fit_takes_the_plan_of_the_first(cache_directory: Path) -> None:
    def step() -> Plan:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)], nn.Linear(32, 1))
        fitted = ebbtide.fit(model, "70%", options=ebbtide.Options(refine=False))
        fitted(torch.randn(256, 32)).sum().backward()
        fitted(torch.randn(256, 32)).sum().backward()
        plan = ebbtide.plan_of(model)
        assert plan is not None
        return plan

    first, second = step(), step()
    assert first.provenance.planned is Planned.SEARCHED
    assert second.provenance.planned is Planned.CACHED
    assert second.schedule == first.schedule

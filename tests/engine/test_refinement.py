"""A first call trains under a plan that is found quickly; a better one is searched beside, and takes its place."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.engine.fitted_class import FITTED
from ebbtide.engine.refinement import Refinements
from ebbtide.planners.base import Answer, Problem
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning import beside
from ebbtide.planning.beside import Search
from ebbtide.planning.cache import CachedAnswer
from ebbtide.step.provenance import Planned
from ebbtide.step.schedule import Schedule
from ebbtide.step.status import Status
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide.zoo import GPTConfig, gpt

Begin = Callable[[str, Sequence[Problem]], Search | None]
EFFORT = 3_000  # more than that of a quick plan
OPTIONS = ebbtide.Options(effort=EFFORT)
MOST_SECONDS = 240.0
SOON = 5.0


def case() -> ebbtide.Case:
    torch.manual_seed(0)
    return gpt(4, GPTConfig(vocabulary=64, length=32, layers=4, width=32, heads=2, dropout=0.1))


@pytest.fixture
def really(searches_beside: Begin, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Search]]:
    """Searches run as they do for users; gives those that were begun, and ends them."""
    begun: list[Search] = []
    monkeypatch.setattr(beside, "NICENESS", 0)  # the machine may be busy

    def begin(planner: str, problems: Sequence[Problem]) -> Search | None:
        search = searches_beside(planner, problems)
        assert search is not None
        begun.append(search)
        return search

    monkeypatch.setattr(Search, "begin", staticmethod(begin))
    yield begun
    for each in begun:
        each.end()


class Told:
    """A search that has found what a test says."""

    def __init__(self, found: list[CachedAnswer | None]) -> None:
        self.goes_on, self.found, self.ended = True, found, False

    def answers(self) -> list[CachedAnswer | None]:
        return self.found

    def end(self) -> None:
        self.ended = True


def train(model: torch.nn.Module, args: tuple[Any, ...], steps: int = 1) -> list[torch.Tensor]:
    """Train with plain gradient descent; losses and, in the end, weights."""
    left: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(*args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left.append(loss.detach().clone())
    return [*left, *(each.detach().clone() for each in model.parameters())]


def refinements_of(model: torch.nn.Module) -> Refinements:
    return FITTED[model].refinements


def planned_quickly(model: torch.nn.Module) -> ebbtide.Plan:
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.provenance.planned is Planned.QUICKLY
    assert not plan.smallest_is_searched
    assert "no smaller one was looked for yet" in plan.details
    return plan


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[Problem], Told]]:
    """Searches that a test answers; gives what they were asked."""
    asked: list[tuple[Sequence[Problem], Told]] = []

    def begin(_: str, problems: Sequence[Problem]) -> Any:
        asked.append((problems, Told([])))
        return asked[-1][1]

    monkeypatch.setattr(Search, "begin", staticmethod(begin))
    return asked


def test_a_better_plan_takes_the_place_of_the_first_with_the_same_bits(really: list[Search]) -> None:
    given = case()
    plain = copy.deepcopy(given.model)
    torch.manual_seed(5)
    ebbtide.fit(given.model, "50%", progress=None, options=OPTIONS)
    found = train(given.model, given.args, 3)
    quick = planned_quickly(given.model)
    begin, steps = time.monotonic(), 3
    while refinements_of(given.model)._now is not None:
        assert time.monotonic() - begin < MOST_SECONDS
        found = [*found[:steps], *train(given.model, given.args)]
        steps += 1
    found = [*found[:steps], *train(given.model, given.args, 3)]
    torch.manual_seed(5)
    expected = train(plain, given.args, steps + 3)
    assert all(map(torch.equal, found, expected))
    plan = ebbtide.plan_of(given.model)
    assert plan is not None
    assert (plan.provenance.planned, plan.provenance.effort) == (Planned.SEARCHED, EFFORT)
    assert plan.smallest_is_searched
    assert plan.smallest_bytes < quick.smallest_bytes
    assert plan.overhead <= quick.overhead
    assert plan.bound is not None
    calls = ebbtide.calls_of(given.model)
    assert (calls.planned, calls.unplanned) == (steps + 3, {})
    again = case()
    ebbtide.fit(again.model, "50%", progress=None, options=OPTIONS)
    train(again.model, again.args)
    known = ebbtide.plan_of(again.model)
    assert known is not None
    assert (known.provenance.planned, known.schedule) == (Planned.CACHED, plan.schedule)
    assert (known.smallest_is_searched, known.smallest_bytes) == (True, plan.smallest_bytes)
    assert len(really) == 1


def test_what_does_not_repay_its_place_tells_bound_and_smallest(told: list[tuple[Sequence[Problem], Told]]) -> None:
    given = case()
    ebbtide.fit(given.model, "50%", progress=None, options=OPTIONS)
    train(given.model, given.args, 2)
    quick = planned_quickly(given.model)
    ((problems, search),) = told
    smallest, _ = smallest_of(problems[0].program, 500)
    search.found = [
        CachedAnswer(Answer(Status.FEASIBLE, quick.schedule, 0.01, "as told"), smallest),
        *[None] * (len(problems) - 1),
    ]
    search.goes_on = False
    train(given.model, given.args, 2)
    plan = ebbtide.plan_of(given.model)
    assert plan is not None
    bound = 0.01 if quick.rewritten is None else quick.rewritten.overhead_of(0.01, quick.program)
    assert (plan.schedule, plan.bound, plan.smallest_is_searched) == (quick.schedule, bound, True)
    assert plan.provenance.planned is Planned.SEARCHED


@pytest.mark.parametrize("wrong", ["illegal", "of another step", "over the budget", "none"])
def test_an_answer_is_not_trusted(told: list[tuple[Sequence[Problem], Told]], wrong: str) -> None:
    given = case()
    ebbtide.fit(given.model, "50%", progress=None, options=OPTIONS)
    train(given.model, given.args, 2)
    quick = planned_quickly(given.model)
    ((problems, search),) = told
    actions = quick.schedule.actions
    schedules = {
        "illegal": Schedule(actions[::-1]),
        "of another step": Schedule(actions[: len(actions) // 2]),
        "over the budget": unplanned_schedule(problems[0].program),
    }
    if wrong != "none":
        search.found = [CachedAnswer(Answer(Status.FEASIBLE, schedules[wrong], 0.0, ""), 1)]
    search.goes_on = False
    train(given.model, given.args, 2)
    assert planned_quickly(given.model) == quick


@pytest.mark.parametrize("change", ["budget", "unfit"])
def test_what_is_asked_for_no_more_is_not_searched(told: list[tuple[Sequence[Problem], Told]], change: str) -> None:
    given = case()
    ebbtide.fit(given.model, "50%", progress=None, options=OPTIONS)
    train(given.model, given.args)
    ((_, search),) = told
    refinements = refinements_of(given.model)
    ebbtide.set_budget(given.model, "60%") if change == "budget" else ebbtide.unfit(given.model)
    assert search.ended
    assert refinements._now is None


def test_a_plan_in_full_is_searched_before_the_first_step(told: list[tuple[Sequence[Problem], Told]]) -> None:
    given = case()
    ebbtide.fit(given.model, "50%", progress=None, options=ebbtide.Options(effort=EFFORT, refine=False))
    train(given.model, given.args)
    plan = ebbtide.plan_of(given.model)
    assert plan is not None
    assert plan.provenance.planned is Planned.SEARCHED
    assert plan.smallest_is_searched
    assert told == []


def test_a_quick_plan_keeps_what_it_knows_in_its_file(told: list[Any], tmp_path: Path) -> None:
    given = case()
    ebbtide.fit(given.model, "50%", progress=None, options=OPTIONS)
    train(given.model, given.args)
    plan = planned_quickly(given.model)
    assert ebbtide.Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert told


# -- processes ------------------------------------------------------------------------------------------------


def long_search(begin: Begin) -> Search:
    """One that takes longer than a test."""
    given = gpt(8, GPTConfig(vocabulary=64, length=64, layers=12, width=32, heads=2))
    plan = ebbtide.plan(given.model, given.args, budget="20%", options=ebbtide.Options(effort=10, progress=None))
    above = plan.budget_bytes - plan.resident_bytes - plan.reserve_bytes
    search = begin("auto", [Problem(program=plan.program, above_budget_bytes=above, effort=10_000_000)])
    assert search is not None
    return search


def is_there(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_search_that_is_ended_leaves_no_process(searches_beside: Begin) -> None:
    search = long_search(searches_beside)
    assert search.goes_on
    assert is_there(search.process.pid)
    search.end()
    assert not is_there(search.process.pid)
    assert not search.goes_on


def test_a_search_that_was_killed_has_no_answer(searches_beside: Begin) -> None:
    search = long_search(searches_beside)
    search.process.kill()
    search.process.wait()
    assert not search.goes_on
    assert search.answers() == []


def test_a_search_has_the_lowest_priority_and_ignores_the_terminals_interrupt(searches_beside: Begin) -> None:
    search = long_search(searches_beside)
    begin = time.monotonic()
    while os.getpriority(os.PRIO_PROCESS, search.process.pid) != 19:
        assert time.monotonic() - begin < SOON
    assert os.getpgid(search.process.pid) != os.getpgid(0)
    search.end()


def test_a_forked_process_ends_nothing_of_its_parents(searches_beside: Begin) -> None:
    search = long_search(searches_beside)
    child = os.fork()
    if child == 0:
        search.end()
        os._exit(17 if not search.goes_on and search.answers() == [] else 18)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 17
    assert search.goes_on
    search.end()


def test_no_process_is_no_search(searches_beside: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    given = gpt(2, GPTConfig(vocabulary=64, length=16, layers=1, width=16, heads=2))
    plan = ebbtide.plan(given.model, given.args, budget="1000%", options=ebbtide.Options(effort=10, progress=None))
    assert searches_beside("auto", [Problem(program=plan.program, above_budget_bytes=2**30)]) is None


SCRIPT = """
import os, sys, time
import ebbtide
from ebbtide.engine.fitted_class import FITTED
from ebbtide.planners.search import smallest
import torch
torch.set_num_threads(1)
from ebbtide.zoo import GPTConfig, gpt
smallest.FIRST_EFFORT = 500
print("runs", flush=True)
torch.manual_seed(0)
case = gpt(4, GPTConfig(vocabulary=64, length=32, layers=4, width=32, heads=2))
ebbtide.fit(case.model, "50%", progress=None, options=ebbtide.Options(effort=100_000_000))
case.model(*case.args).backward()
print(FITTED[case.model].refinements._now[2].process.pid, flush=True)
{end}
"""
ENDS = {
    "it returns": "",
    "it raises": "raise ValueError",
    "it is killed": "os.kill(os.getpid(), 9)",
    "it exits at once": "os._exit(3)",
    "it is interrupted": "os.kill(os.getpid(), 2); time.sleep(60)",
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_stays_behind_however_a_script_ends(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=ENDS[end]))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=120)
    first, number = done.stdout.split()
    assert first == "runs", "the script ran once"
    begin = time.monotonic()
    while is_there(int(number)):
        assert time.monotonic() - begin < SOON, done.stderr
        time.sleep(0.05)
    assert {each.name for each in tmp_path.iterdir()} <= {"script.py", "cache"}


def test_the_answer_of_a_process_is_that_of_the_planner(
    searches_beside: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "NICENESS", 0)  # the machine may be busy
    given = case()
    plan = ebbtide.plan(given.model, given.args, budget="50%", options=ebbtide.Options(effort=10, progress=None))
    above = plan.budget_bytes - plan.resident_bytes - plan.reserve_bytes
    problem = Problem(program=plan.program, above_budget_bytes=above, effort=300, seeds=(plan.schedule,))
    impossible = replace(problem, above_budget_bytes=1, seeds=())
    search = searches_beside("auto", [problem, impossible])
    assert search is not None
    begin = time.monotonic()
    while search.goes_on:
        assert time.monotonic() - begin < MOST_SECONDS
        time.sleep(0.05)
    first, second = search.answers()
    assert first is not None
    assert first.answer == beside.planner_named("auto")(problem)
    assert second is None


def test_signals_are_the_users(searches_beside: Begin) -> None:
    before = signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGINT)
    search = long_search(searches_beside)
    search.end()
    assert (signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGINT)) == before

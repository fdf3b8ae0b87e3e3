"""Small models that have everything the large ones have, each captured and planned once per thread count."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide._api.verify import Verifier
from ebbtide.case import Case
from ebbtide.engine import compiled
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.units import Budget
from ebbtide.zoo import GPTConfig, gpt, mlp_chain
from short_searches import short_searches

EFFORT = 200


def small_gpt(dropout: float, tied: bool) -> Case:
    config = GPTConfig(vocabulary=64, length=16, layers=1, width=16, heads=2, dropout=dropout, tied=tied)
    return gpt(4, config)


BUILDERS: dict[str, Callable[[], Case]] = {
    "mlp_chain": lambda: mlp_chain(128, layers=4, width=32),
    "mlp_chain with dropout": lambda: mlp_chain(128, layers=4, width=32, dropout=0.1),
    "gpt": lambda: small_gpt(0.0, tied=True),
    "gpt with dropout": lambda: small_gpt(0.1, tied=True),
    "gpt untied": lambda: small_gpt(0.0, tied=False),
    "gpt untied with dropout": lambda: small_gpt(0.1, tied=False),
}


_short_searches = short_searches(EFFORT)


@dataclass
class Study:
    """A case with its unplanned plan, from which plans at any depth are made."""

    case: Case
    unplanned: ebbtide.Plan

    def __post_init__(self) -> None:
        self._verifier = Verifier(self.case.model, self.case.args, self.case.kwargs)
        self._within = functools.cache(self._planned)

    def check(self, plan: ebbtide.Plan) -> ebbtide.Verification:
        """``plan`` against the captured and the eager step, which are run once, from one seed."""
        torch.manual_seed(2)
        return self._verifier.check(plan)

    def at(self, share: float) -> ebbtide.Plan:
        """The plan at an f-budget: smallest + share * (unplanned - smallest), nothing in reserve."""
        smallest, _ = smallest_of(self.unplanned.program)
        above = int(smallest + share * (self.unplanned.baseline.above_bytes - smallest))
        return self._within(above)

    def just_above_smallest(self) -> ebbtide.Plan:
        smallest, _ = smallest_of(self.unplanned.program)
        return self._within(int(1.02 * smallest))

    def _planned(self, above_bytes: int) -> ebbtide.Plan:
        resident = self.unplanned.resident_bytes
        options = PlanningOptions(effort=EFFORT, provenance=self.unplanned.provenance)
        return make_plan(
            self.unplanned.program, Budget(bytes=resident + above_bytes), resident_bytes=resident, options=options
        )


@pytest.fixture(scope="session")
def study() -> Callable[[str, int], Study]:
    """The study of a named model at a thread count."""
    known: dict[tuple[str, int], Study] = {}

    def get(name: str, threads: int = 1) -> Study:
        if (name, threads) not in known:
            torch.manual_seed(1)
            torch.set_num_threads(threads)
            case = BUILDERS[name]()
            known[name, threads] = Study(
                case,
                ebbtide.plan(case.model, case.args, budget="1000%", name=name, options=ebbtide.Options(effort=EFFORT)),
            )
        return known[name, threads]

    return get


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every capture that has come to a joint graph."""
    found: list[Any] = []
    made = compiled.Capture.partition

    def partition(self: Any, *args: Any) -> Any:
        graphs = made(self, *args)
        found.append(self)
        return graphs

    monkeypatch.setattr(compiled.Capture, "partition", partition)
    return found

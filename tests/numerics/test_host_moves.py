"""Steps that move through the host tier, its streams replaced by ones that do everything at once, on CPU.

What a device does in which order is tested with the fake device (``tests/transfers/test_host.py``) and on cards. This
is about the rest of the way: plans, lowered graphs, pending steps, and that nothing is kept beyond its free.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_budgets import as_predicted

import ebbtide
from ebbtide._api import fit as fit_module
from ebbtide._api import verify as verify_module
from ebbtide.report.plan import Plan
from ebbtide.step import legality
from ebbtide.step.machine import Link
from ebbtide.step.simulate import simulate
from ebbtide.transfers.host import HostTier
from ebbtide.transfers.streams import Edge
from random_schedule import DISK_MACHINE, random_schedule

HOST_MACHINE = replace(DISK_MACHINE, links={"host": Link("host", 2**33, 1e9, 1e9, 1e-4, alignment_bytes=512)})


class AtOnce:
    """A port to a device that is never behind."""

    def current(self, device: torch.device) -> str:
        return "compute"

    def side(self, device: torch.device, way: str) -> str:
        return way

    def record(self, stream: str, *, timed: bool = False) -> object:
        return object()

    def wait(self, stream: str, event: object, edge: Edge) -> None: ...

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: str) -> None:
        to.copy_(source)

    def finish(self, event: object) -> None: ...

    def seconds(self, begin: object, end: object) -> float:
        return 0.5

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> HostTier:
    """What the name ``host`` stands for."""
    found = HostTier(AtOnce())
    for module in (fit_module, verify_module):
        monkeypatch.setattr(module, "open_tiers", lambda *_: {"host": found})
    return found


def moving(unplanned: Plan, seed: int, drop: float, room: int = 0) -> Plan:
    """A plan with a random schedule that moves to the host, and its budget."""
    program = unplanned.program
    schedule = random_schedule(program, seed, drop, tiers=("host",))
    assert legality.check(program, schedule, links=HOST_MACHINE.links) == []
    assert schedule.moves
    above = simulate(program, schedule, HOST_MACHINE).above_bytes
    budget = unplanned.resident_bytes + unplanned.reserve_bytes + above + room
    return replace(unplanned, schedule=schedule, machine=HOST_MACHINE, tiers=("host",), budget_bytes=budget)


@pytest.mark.parametrize("model", ["mlp_chain with dropout", "gpt with dropout"])
def test_a_schedule_that_moves_to_the_host_is_the_same_step(study: Any, tier: HostTier, model: str) -> None:
    subject = study(model)
    case = subject.case
    for seed in range(3):
        plan = moving(subject.unplanned, seed, 0.02 + 0.04 * seed)
        result = ebbtide.verify(case.model, case.args, case.kwargs, plan)
        assert result.differences == ()
        assert as_predicted(result), (result.predicted_above_bytes, result.measured_above_bytes)


def test_fitted_steps_move_to_the_host_and_give_their_slabs_back(study: Any, tier: HostTier) -> None:
    subject = study("mlp_chain with dropout")
    eager = copy.deepcopy(subject.case.model)
    model = ebbtide.fit(copy.deepcopy(subject.case.model), moving(subject.unplanned, 3, 0.04, 2**20), progress=None)
    for _ in range(3):
        state = torch.get_rng_state()
        for each in (model, eager):
            each.zero_grad()
            torch.set_rng_state(state)
            each(*subject.case.args).backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    step = ebbtide.step_of(model)
    assert step is not None
    assert step.phase.name == "STEADY"
    assert step.traffic is not None
    assert step.traffic.timed, "the seconds of the measured step stay"
    copies = step.traffic.transfer_seconds
    assert copies > 0
    assert copies == step.traffic.waited_seconds, "one wait per copy, of half a second each"
    (slab,) = tier._free  # pyright: ignore[reportPrivateUsage]
    assert slab.under_way == set()


def test_a_failed_step_keeps_nothing_and_the_next_one_is_right(study: Any, tier: HostTier) -> None:
    subject = study("mlp_chain with dropout")
    model = ebbtide.fit(copy.deepcopy(subject.case.model), moving(subject.unplanned, 3, 0.04, 2**20), progress=None)
    for _ in range(3):
        loss = model(*subject.case.args)
        loss.register_hook(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        del loss
    model(*subject.case.args).backward()
    assert [slab.under_way for slab in tier._free] == [set()]  # pyright: ignore[reportPrivateUsage]

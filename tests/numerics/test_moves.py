"""Steps that move buffers to the disk and back: the same bits, the bytes that were predicted, whatever happens."""

from __future__ import annotations

import copy
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_budgets import as_predicted
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.errors import CaptureError, PlanMismatch, TierError, VerificationError
from ebbtide.report.plan import Plan
from ebbtide.step import legality
from ebbtide.step.schedule import Compute, Offload, Reload
from ebbtide.transfers.arena import Arena
from ebbtide.transfers.disk import Region
from random_schedule import DISK_MACHINE, random_schedule, with_schedule

MODELS = ("mlp_chain with dropout", "gpt with dropout")


def moving(subject: Any, seed: int, drop: float = 0.04, room: int = 0) -> Plan:
    """A plan with a random schedule that moves, and its budget."""
    program = subject.unplanned.program
    schedule = random_schedule(program, seed, drop, tiers=("disk",))
    assert legality.check(program, schedule, links=DISK_MACHINE.links) == []
    assert schedule.moves
    plan = with_schedule(subject.unplanned, schedule)
    return replace(plan, budget_bytes=plan.budget_bytes + room)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", MODELS)
def test_a_schedule_that_moves_is_the_same_step(study: Any, model: str, seed: int, tmp_path: Path) -> None:
    subject = study(model)
    plan = moving(subject, seed, drop=0.02 + 0.02 * seed)
    case = subject.case
    result = ebbtide.verify(case.model, case.args, case.kwargs, plan, options=ebbtide.Options(tiers=f"disk:{tmp_path}"))
    assert result.differences == ()
    assert result.eager_differences == ()
    assert as_predicted(result), (result.predicted_above_bytes, result.measured_above_bytes)


def test_random_schedules_combine_moves_with_reruns_on_both_sides(study: Any) -> None:
    program = study("gpt with dropout").unplanned.program
    out = back = reruns = 0
    for seed in range(6):
        schedule = random_schedule(program, seed, 0.02 + 0.02 * seed, tiers=("disk",))
        out += sum(isinstance(action, Offload) for action in schedule.actions)
        back += sum(isinstance(action, Reload) for action in schedule.actions)
        reruns += sum(isinstance(action, Compute) for action in schedule.actions) - len(program.ops)
    assert min(out, back, reruns) > 50


class Fitted:
    """A case that runs a plan which moves, beside eager."""

    def __init__(self, subject: Any, plan: Plan, directory: Path) -> None:
        self.case = subject.case
        self.eager = copy.deepcopy(self.case.model)
        self.model = ebbtide.fit(copy.deepcopy(self.case.model), plan, tiers=f"disk:{directory}", progress=None)

    def step(self) -> Any:
        """One step of both; what ran."""
        state = torch.get_rng_state()
        for model in (self.model, self.eager):
            model.zero_grad()
            torch.set_rng_state(state)
            model(*self.case.args, **self.case.kwargs).backward()
        self.compare()
        return ebbtide.step_of(self.model)

    def compare(self) -> None:
        for one, other in zip(self.model.parameters(), self.eager.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)


@pytest.fixture
def fitted(study: Any, tmp_path: Path) -> Fitted:
    subject = study("mlp_chain with dropout")
    return Fitted(subject, moving(subject, 3, 0.1, room=2**20), tmp_path)


def test_what_comes_back_from_a_tier_is_proven_measured_and_then_steady(fitted: Fitted, tmp_path: Path) -> None:
    steps = [fitted.step() for _ in range(3)]
    step = steps[-1]
    plan = step.plan
    reloads = {action.buffer for action in plan.schedule.actions if isinstance(action, Reload)}
    assert step.verified_buffers >= len(reloads)
    assert abs(step.measured_above_bytes - plan.timeline.above_bytes) <= 64
    assert step.traffic.out_bytes > 0
    assert step.traffic.in_bytes > 0
    assert step.phase.name == "STEADY"
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_changes_on_the_disk_raises_before_any_gradient(
    fitted: Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Region.read

    def damaged(self: Region, offset: int, tensor: torch.Tensor) -> None:
        read(self, offset, tensor)
        if tensor.dtype is torch.float32:
            tensor.add_(1.0)

    monkeypatch.setattr(Region, "read", damaged)
    with pytest.raises(VerificationError):
        fitted.model(*fitted.case.args).backward()
    assert all(each.grad is None for each in fitted.model.parameters())
    monkeypatch.undo()
    fitted.step()


@pytest.mark.parametrize("way", ["write", "read"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_failing_disk_is_an_error_and_the_next_step_is_right(
    fitted: Fitted, monkeypatch: pytest.MonkeyPatch, way: str, after: int
) -> None:
    fitted.step()
    move, count = getattr(Region, way), [0]

    def failing(self: Region, offset: int, tensor: torch.Tensor) -> None:
        count[0] += 1
        if count[0] > after:
            raise OSError(5, "Input/output error")
        move(self, offset, tensor)

    monkeypatch.setattr(Region, way, failing)
    fitted.model.zero_grad()
    with pytest.raises(TierError, match="Input/output error"):
        fitted.model(*fitted.case.args).backward()
    assert all(each.grad is None for each in fitted.model.parameters())
    monkeypatch.undo()
    fitted.step()


def test_a_full_disk_is_said_before_anything_has_run(fitted: Fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    state = torch.get_rng_state()
    with pytest.raises(TierError, match="Nothing of this step has run"):
        fitted.model(*fitted.case.args)
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.undo()
    fitted.step()


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
def test_forwards_pending_keep_their_copies_apart_and_a_retained_graph_keeps_its_own(fitted: Fitted) -> None:
    fitted.step()
    gradients: list[list[torch.Tensor]] = []
    for model in (fitted.model, fitted.eager):
        torch.manual_seed(5)
        model.zero_grad()
        first, second = (model(*fitted.case.args) for _ in range(2))
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        gradients.append([each.grad for each in model.parameters() if each.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_a_backward_that_never_comes_and_an_exception_leave_no_region_in_use(
    fitted: Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted.step()
    made: list[Region] = []
    init = Region.__init__

    def counted(self: Region, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(Region, "__init__", counted)
    for _ in range(5):
        del_me = fitted.model(*fitted.case.args)
        del del_me
    for _ in range(3):
        loss = fitted.model(*fitted.case.args)
        loss.register_hook(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        del loss
    fitted.step()
    assert len(made) <= 2, "regions are not used again"


def test_a_step_in_another_thread_moves_through_its_own_arena(fitted: Fitted) -> None:
    fitted.step()
    failed: list[BaseException] = []

    def train() -> None:
        try:
            fitted.model(*fitted.case.args).backward()
        except BaseException as error:
            failed.append(error)

    fitted.model.zero_grad()
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert failed == []
    assert all(each.grad is not None for each in fitted.model.parameters())


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
def test_a_forked_child_trains_and_its_parent_goes_on(fitted: Fitted) -> None:
    fitted.step()
    pending = fitted.model(*fitted.case.args)
    child = os.fork()
    if not child:
        ended = 1
        try:
            try:
                pending.backward()
            except TierError as error:
                ended = 0 if "forked" in str(error) else 2
                fitted.step()
            except RuntimeError as error:  # torch's own: its CUDA builds do so once anything has been compiled
                ended = 0 if torch.version.cuda and "fork-based" in str(error) else 4
        except BaseException:
            ended = 3
        finally:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pending.backward()
    fitted.step()


def test_inside_of_a_checkpoint_a_given_plan_that_moves_is_refused_by_name(fitted: Fitted) -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any) -> Any:
            return checkpoint(self.inner, *args, use_reentrant=False)

    with pytest.raises(CaptureError, match="moves tensors, and this call is inside of a checkpoint"):
        Outer(fitted.model)(*fitted.case.args)


def test_a_plan_whose_tier_is_not_named_is_a_mismatch(study: Any) -> None:
    subject = study("gpt with dropout")
    with pytest.raises(PlanMismatch, match="does not name that"):
        ebbtide.fit(copy.deepcopy(subject.case.model), moving(subject, 3), tiers=[])


def test_an_arena_goes_with_its_flight(fitted: Fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Arena] = []
    init = Arena.__init__

    def counted(self: Arena, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(Arena, "__init__", counted)
    fitted.step()
    (arena,) = made
    assert arena._regions.of == {}  # pyright: ignore[reportPrivateUsage]

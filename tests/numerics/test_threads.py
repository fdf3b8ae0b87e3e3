"""Several threads that train at once: right bits, no crash, nothing proven or measured across them."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine.executor import choose_checks
from ebbtide.engine.fitted_class import FITTED
from ebbtide.engine.pending_steps import PendingStep

SCRIPT = """
import copy, threading, torch, ebbtide
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x if OUTSIDE else x.square().mean()

def trained(models, warm):
    plain, batches = Net(), [torch.randn(256, 64) for _ in range(3)]
    loss = (lambda output: output.square().mean()) if OUTSIDE else (lambda output: output)
    expected = [torch.autograd.grad(loss(plain(x)), list(plain.parameters())) for x in batches]
    budget = "300%" if OUTSIDE else smallest + 2_000_000
    fitted = [ebbtide.fit(copy.deepcopy(plain), budget, options=ebbtide.Options(effort=100)) for _ in range(models)]
    for model in fitted * warm:
        loss(model(batches[0])).backward()
    right = []

    def train(index):
        model = fitted[index % models]
        for _ in range(20):
            found = torch.autograd.grad(loss(model(batches[index])), list(model.parameters()))
            right.append(all(torch.equal(a, b) for a, b in zip(found, expected[index])))

    threads = [threading.Thread(target=train, args=(index,)) for index in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return len(right), all(right)

torch.set_num_threads(1)
OUTSIDE = False
quick = ebbtide.Options(effort=10)
smallest = ebbtide.plan(Net(), (torch.randn(256, 64),), budget="1000%", options=quick).smallest_bytes
for OUTSIDE, models, warm in ((False, 1, 0), (False, 1, 1), (False, 3, 1), (True, 1, 1)):
    print(OUTSIDE, models, warm, *trained(models, warm), flush=True)
"""


@pytest.mark.long
def test_threads_train_at_once_on_batches_of_their_own() -> None:
    # In a process of its own: what is tested ended it with a segmentation fault.
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=600
    )
    said = ["False 1 0", "False 1 1", "False 3 1", "True 1 1"]
    assert ended.stdout.splitlines() == [f"{each} 60 True" for each in said], ended.stderr[-2000:]
    assert ended.returncode == 0, ended.stderr[-2000:]


LEAVES = """
import sys, threading, torch
from torch import nn
from ebbtide.torch_seams.autograd import gradient_leaf

class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *parameters):
        return torch.empty(0)

def begin_steps():
    for _ in range(20_000):
        Step.apply(*parameters)

def look():
    for _ in range(3_000):
        for each in parameters:
            gradient_leaf(each)

sys.setswitchinterval(1e-5)
parameters = [nn.Parameter(torch.randn(4)) for _ in range(8)]
threads = [threading.Thread(target=each, daemon=True) for each in (begin_steps, look, look)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


def test_a_look_at_a_leaf_and_the_begin_of_a_step_in_another_thread_do_not_wait_for_each_other() -> None:
    # For good, that was: each had what the other waited for, the interpreter's lock and the parameter's.
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LEAVES], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


COLD = """
import copy, sys, threading, torch, ebbtide
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

torch.set_num_threads(1)
torch.manual_seed(0)
batches = [torch.randn(32, 96) for _ in range(4)]

def trained(model, step):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if step is not None:
        ebbtide.fit(model, "1GiB", optimizer=optimizer, step=step, progress=None, options=ebbtide.Options(effort=1))
    for x in batches * 4:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().clone() for each in model.parameters()]

for _ in range(2):
    plain = [Net() for _ in range(4)]
    expected = [trained(copy.deepcopy(each), None) for each in plain]
    found = {}
    def train(index):
        found[index] = trained(plain[index], ("outside", "inside")[index % 2])
    threads = [threading.Thread(target=train, args=(index,)) for index in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    print(sorted(found), all(torch.equal(a, b) for i in found for a, b in zip(found[i], expected[i])), flush=True)
"""


@pytest.mark.long
@pytest.mark.slow
def test_optimizers_step_as_in_eager_while_other_threads_capture() -> None:
    # Dynamo tells the whole process that it compiles, and AdamW computes its corrections otherwise then.
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COLD], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.stdout.splitlines() == ["[0, 1, 2, 3] True"] * 2, ended.stdout + ended.stderr[-2000:]
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_a_budget_that_is_set_while_another_thread_plans_is_not_lost() -> None:
    planning, told = threading.Event(), threading.Event()

    def progress(each: object) -> None:
        if "lowering" in str(each):
            planning.set()
            told.wait(60)

    body = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
    model = ebbtide.fit(nn.Sequential(*body, _Mean()), "1GiB", progress=progress, options=ebbtide.Options(effort=1))
    x = torch.randn(512, 64)
    thread = threading.Thread(target=lambda: model(x).backward())
    thread.start()
    assert planning.wait(60)
    ebbtide.set_budget(model, 1_500_000)
    told.set()
    thread.join()
    model(x).backward()
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.budget_bytes == 1_500_000


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def test_a_flight_that_is_being_proven_is_left_alone_until_it_came_to_nothing() -> None:
    model = ebbtide.fit(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)),
        "1GiB",
        options=ebbtide.Options(effort=10),
    )
    x = torch.randn(1, 4)
    model(x).backward()
    step = ebbtide.step_of(model)
    assert step is not None
    ebbtide.set_budget(model, "2GiB")
    loss = model(x)  # a new plan, in the air and being proven
    executable = step.executable
    assert executable is not None
    pending = FITTED[model].pending
    second = PendingStep(executable, pending)
    choose_checks(second, "cpu")
    assert not second.proves, "two pending steps would share the names of their buffers"
    del loss
    first = PendingStep(executable, pending)
    choose_checks(first, "cpu")  # its forward has not returned, as in another thread
    assert first.proves
    choose_checks(second, "cpu")
    assert first.proves
    assert not second.proves
    first.abandon()  # its forward raised
    choose_checks(second, "cpu")
    assert second.proves

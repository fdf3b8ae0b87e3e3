"""What may happen while a model trains, and whether the next step is right and planned after it.

1. *Right* is bit by bit: loss and gradients of the next step are an eager twin's. *Planned* is a plan whose predicted
   peak is within the budget, and a step under it that ran.
2. The process's memory is its private dirty pages (``Private_Dirty`` of ``/proc/self/smaps_rollup``) after a garbage
   collection and ``malloc_trim``. It is *flat* if the median of the last quarter of the samples is within 5 % of the
   median of the second quarter: what the first calls of each shape load and learn lies before.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ebbtide
from ebbtide.errors import EbbtideError
from harness.record import Row, at_most, holds

__all__ = ["CASES", "Net", "next_step_is_right", "rows"]

TITLE = "Soak: after each of these the next step is right (eager's bits) and planned, or memory is flat"
MOST_GROWTH = 1.05
BUDGET = "384KiB"  # below what eager takes from 256 rows on
WIDTH = 32


class Net(nn.Module):
    """Toy of three blocks. ``fail`` is called with the name of each place that the step passes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def made(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def fitted(seed: int = 0, **options: Any) -> Net:
    return ebbtide.fit(made(seed), BUDGET, progress=None, options=ebbtide.Options(effort=50, **options))


def next_step_is_right(model: nn.Module, size: int = 256, seed: int = 1) -> bool:
    """Definition 1."""
    eager = Net()
    eager.load_state_dict(model.state_dict())
    found: list[list[torch.Tensor]] = []
    for each in (model, eager):
        each.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        x = torch.randn(size, WIDTH)
        loss = each(x)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
    plan = ebbtide.plan_of(model)
    planned = plan is not None and plan.predicted_peak_bytes <= plan.budget_bytes
    return planned and len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


# -- memory ---------------------------------------------------------------------------------------------------


def private_bytes() -> int:
    """Definition 2."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no Private_Dirty in /proc/self/smaps_rollup: this benchmark needs Linux")


def growth(samples: list[int]) -> float:
    """Of the second quarter's median, what the last quarter's is."""
    quarter = len(samples) // 4
    return statistics.median(samples[-quarter:]) / statistics.median(samples[quarter : 2 * quarter])


def shapes(quick: bool) -> dict[str, Any]:
    """Steps of changing shapes with an optimizer; every tenth is held against eager."""
    steps, kinds = (200, 6) if quick else (2000, 24)
    model = fitted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    draw, samples, right = random.Random(0), [], True
    for step in range(steps):
        size = 16 * draw.randint(1, kinds)
        if step % 10 == 0:
            right &= next_step_is_right(model, size, step)
        optimizer.zero_grad()
        model(torch.randn(size, WIDTH)).backward()
        optimizer.step()
        if step % (steps // 40) == 0:
            samples.append(private_bytes())
    return {"times": steps, "right": right, "samples": samples}


def models(quick: bool) -> dict[str, Any]:
    """Models in a row, each with an optimizer that fit knows of, two steps each."""
    count, samples, right = (24 if quick else 200), [], True
    for seed in range(count):
        model = made(seed)
        optimizer = torch.optim.AdamW(model.parameters())
        ebbtide.fit(model, BUDGET, progress=None, optimizer=optimizer, options=ebbtide.Options(effort=50))
        right &= next_step_is_right(model)
        optimizer.step()
        right &= next_step_is_right(model)
        del model, optimizer
        samples.append(private_bytes())
    return {"times": count, "right": right, "samples": samples}


# -- what goes wrong ------------------------------------------------------------------------------------------


def interrupts(quick: bool) -> dict[str, Any]:
    """SIGINT at random moments of first calls and of later steps."""
    moments = 10 if quick else 50
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    draw, right, hit, otherwise = random.Random(0), 0, 0, 0
    for warm in range(2):  # in the first, the planners are loaded
        begin = time.perf_counter()
        fitted(warm)(torch.randn(256 + 16 * warm, WIDTH)).backward()
    first_seconds = time.perf_counter() - begin
    for moment in range(moments):
        model = fitted(moment)
        if moment % 2:
            model(torch.randn(256, WIDTH)).backward()
        timer = threading.Timer(draw.random() * first_seconds, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            end = time.perf_counter() + 1.2 * first_seconds
            while time.perf_counter() < end:
                model(torch.randn(16 * draw.randint(1, 6), WIDTH)).backward()
        except KeyboardInterrupt:
            hit += 1
        except EbbtideError:  # torch swallowed the interrupt in a callback, and failed for want of what that was to do
            hit += 1
            otherwise += 1
        timer.join()
        right += next_step_is_right(model)
    return {"times": moments, "right": right == moments, "interrupted": hit, "as an error of ours": otherwise}


class _Fails(torch.autograd.Function):
    """Raises where it is told to."""

    where = ""

    @staticmethod
    def check(place: str) -> None:
        if _Fails.where == place:
            _Fails.where = ""
            raise ArithmeticError(place)


@torch.library.custom_op("soak::pass_on", mutates_args=())
def _pass_on(x: torch.Tensor) -> torch.Tensor:
    _Fails.check("forward op")
    return x.clone()


@torch.library.custom_op("soak::pass_back", mutates_args=())
def _pass_back(gradient: torch.Tensor) -> torch.Tensor:
    _Fails.check("backward op")
    return gradient.clone()


_pass_on.register_fake(torch.empty_like)
_pass_back.register_fake(torch.empty_like)
_pass_on.register_autograd(lambda _, gradient: _pass_back(gradient))


class _Custom(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = _pass_on(block(x))
        return x.square().mean()


def errors(quick: bool) -> dict[str, Any]:
    """An exception in an op of the forward or the backward, a loss outside, hooks around, and the optimizer."""
    places = ["forward op", "backward op", "forward hook", "forward pre-hook", "gradient hook", "loss", "optimizer"]
    rounds, right, raised = (1 if quick else 5), 0, 0
    for _ in range(rounds):
        for place in places:
            torch.manual_seed(0)
            model = ebbtide.fit(_Custom(), BUDGET, progress=None, options=ebbtide.Options(effort=50))
            for before in range(3):  # in the first, the proven and the measured step
                _Fails.where = place
                raised += _step_with_hooks(model, before)
                _Fails.where = ""
                right += next_step_is_right_of(_Custom(), model)
    return {"times": 3 * rounds * len(places), "right": right == raised == 3 * rounds * len(places)}


def _step_with_hooks(model: nn.Module, seed: int) -> bool:
    """A step; whether it raised what was asked for."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = [
        model.register_forward_hook(lambda *_: _Fails.check("forward hook")),
        model.register_forward_pre_hook(lambda *_: _Fails.check("forward pre-hook")),
        next(model.parameters()).register_hook(lambda *_: _Fails.check("gradient hook")),
        optimizer.register_step_pre_hook(lambda *_: _Fails.check("optimizer")),
    ]
    try:
        loss = model(torch.randn(256, WIDTH))
        _Fails.check("loss")
        loss.backward()
        optimizer.step()
    except ArithmeticError:
        return True
    finally:
        for each in hooks:
            each.remove()
    return False


def next_step_is_right_of(eager: nn.Module, model: nn.Module) -> bool:
    eager.load_state_dict(model.state_dict())
    found: list[list[torch.Tensor]] = []
    for each in (model, eager):
        each.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = each(torch.randn(256, WIDTH))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
    return ebbtide.plan_of(model) is not None and all(map(torch.equal, *found))


def threads(quick: bool) -> dict[str, Any]:
    """Models that train in threads of their own, each with first calls of its own."""
    count, rounds = (2, 2) if quick else (4, 10)
    outcomes: list[bool] = []

    def train(seed: int) -> None:
        model, right = fitted(seed), True
        generator = torch.Generator().manual_seed(seed)
        for step in range(rounds):
            x = torch.randn(16 * (1 + step % 3), WIDTH, generator=generator)
            model.eval()  # dropout draws from the generator that all threads share
            eager = made(seed).eval()
            eager.load_state_dict(model.state_dict())
            model.zero_grad()
            model(x).backward()
            eager(x).backward()
            pairs = zip(model.parameters(), eager.parameters(), strict=True)
            right &= all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)
            right &= ebbtide.plan_of(model) is not None
        outcomes.append(right)

    workers = [threading.Thread(target=train, args=(seed,)) for seed in range(count)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    return {"times": count * rounds, "right": outcomes == [True] * count and next_step_is_right(fitted(9))}


# -- processes ------------------------------------------------------------------------------------------------


def forks(quick: bool) -> dict[str, Any]:
    """Children of ``fork`` that train a model that the parent has fitted, and one of their own."""
    count, model, right = (1 if quick else 5), fitted(), True
    right &= next_step_is_right(model)
    for _ in range(count):
        child = os.fork()
        if child == 0:
            good = next_step_is_right(model, 80) and next_step_is_right(fitted(3), 48)
            os._exit(0 if good else 1)
        right &= os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        right &= next_step_is_right(model, 96)
    return {"times": count, "right": right}


def spawns(quick: bool) -> dict[str, Any]:
    """Processes of their own one after another, each of which gets the parent's fitted model as a pickle."""
    count = 1 if quick else 3
    context = torch.multiprocessing.get_context("spawn")
    model, right = fitted(), True
    right &= next_step_is_right(model)
    for _ in range(count):
        with context.Pool(1) as pool:
            right &= pool.apply(_train_spawned, (model,))
        right &= next_step_is_right(model)
    return {"times": count, "right": right}


def _train_spawned(model: Net) -> bool:
    torch.set_num_threads(1)
    return next_step_is_right(ebbtide.fit(model, BUDGET, progress=None, options=ebbtide.Options(effort=50)))


_CHILD = (
    "import sys, torch; torch.set_num_threads(1); from questions.soak import fitted, next_step_is_right; "
    "m = fitted(int(sys.argv[1])); print('on', flush=True); sys.exit(not next_step_is_right(m))"
)


def _child(caches: str, seed: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "XDG_CACHE_HOME": caches, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", _CHILD, str(seed)], env=environment, stdout=subprocess.PIPE)


def _ends_well(process: subprocess.Popen[bytes]) -> bool:
    process.communicate()
    return process.returncode == 0


def cold_cache(quick: bool) -> dict[str, Any]:
    """Processes that start at once on one empty cache; numba's is empty too. Then one that finds what they kept."""
    count = 3 if quick else 20
    with tempfile.TemporaryDirectory() as caches:
        right = all([_ends_well(each) for each in [_child(caches, seed) for seed in range(count)]])
        right &= bool(list(Path(caches).rglob("costs-*.json"))) and not list(Path(caches).rglob("*.json.*.tmp"))
        right &= _ends_well(_child(caches, 0))
    return {"times": count, "right": right}


def kills(quick: bool) -> dict[str, Any]:
    """Kill -9 at random moments of a first call, on one cache; then one that is not killed."""
    count, draw, right = (2 if quick else 15), random.Random(0), True
    with tempfile.TemporaryDirectory() as caches:
        for seed in range(count):
            process = _child(caches, seed)
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(draw.random() * 3.0)
            process.kill()
            process.communicate()
            if seed % 5 == 0:
                right &= _ends_well(_child(caches, seed))
        right &= _ends_well(_child(caches, 0))
    return {"times": count, "right": right}


def full_disk(quick: bool) -> dict[str, Any]:
    """A cache on a disk that is full: every write of a file fails beyond the first bytes (``RLIMIT_FSIZE``)."""
    import resource

    right = True
    with tempfile.TemporaryDirectory() as caches:
        os.environ["XDG_CACHE_HOME"] = caches
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        for most in (0, 100) if quick else (0, 1, 100, 1000, 3000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
            right &= next_step_is_right(fitted(most), 64 + most % 7)
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            right &= not list(Path(caches).rglob("*.json.*.tmp"))
        right &= next_step_is_right(fitted(5), 112)
        right &= bool(list(Path(caches).rglob("costs-*.json")))
    return {"times": 2 if quick else 5, "right": right}


_QUESTIONS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "steps of changing shapes": shapes,
    "models in a row": models,
    "SIGINT": interrupts,
    "exceptions": errors,
    "threads": threads,
    "fork": forks,
    "spawn": spawns,
    "processes on one cold cache": cold_cache,
    "kill -9": kills,
    "a full disk": full_disk,
}
CASES = tuple(_QUESTIONS)
QUICK = CASES


def rows(name: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    found = _QUESTIONS[name](quick)
    samples = found.pop("samples", None)
    checks = [holds("right and planned", found["right"])]
    columns: dict[str, Any] = {"case": name, **found}
    if samples is not None:
        columns.update({"first_bytes": samples[0], "last_bytes": samples[-1], "growth": growth(samples)})
        checks.append(at_most("growth of the process", columns["growth"], MOST_GROWTH))
    yield Row("soak", columns, tuple(checks))

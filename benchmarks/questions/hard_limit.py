"""The hard limit: a process under ``RLIMIT_DATA`` in which the eager step dies and the planned one finishes.

1. The limit is the same absolute number for both: what the process holds privately before its first step, as the
   larger of the two processes has it, plus a level midway between the planned and eager's measured peaks.
2. ``RLIMIT_DATA`` counts every private writable page of the process (Linux 4.7 and later), so nothing hides: the
   interpreter, torch, capture and the plan are inside as well.
3. The plan is made in another process and comes as a plan file. Losses are compared with an unlimited eager run.
4. All processes run under a fixed ``MALLOC_MMAP_THRESHOLD_``. By default glibc raises that threshold to the size of
   the largest block freed so far (up to 32 MiB) and then serves tensors from its heap, where what is freed comes
   back to the system only from the top: the process then holds far more than its tensors. The column
   ``planned, default malloc`` says how the planned run fares without the setting.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import ebbtide
from ebbtide.zoo import GPTConfig, gpt, mlp_chain
from harness.children import short_error
from harness.grid import captured
from harness.measuring import above_bytes, clear
from harness.record import Row, holds

TITLE = "Hard limit: the same RLIMIT_DATA for both; eager dies, Ebbtide finishes"
STEPS = 3
FIXED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(256 * 2**10)}
SHARE = 0.1  # of the way from smallest to unplanned: what the planned process is given

_GPT = GPTConfig(vocabulary=512, length=256, layers=24, width=128, heads=4)
CASES: dict[str, Callable[[], ebbtide.Case]] = {
    "mlp_chain": lambda: mlp_chain(32768, layers=24, width=128),
    "gpt": lambda: gpt(16, _GPT),
}
QUICK = ("mlp_chain",)


def rows(name: str, quick: bool) -> Iterator[Row]:
    """Three processes per case: eager without limit, eager under it, planned under it."""
    torch.set_num_threads(1)
    case = _build(name)
    eager_above = above_bytes(case.model, case.model, case.args)
    known = captured(case)
    plan = known.plan(known.grid_bytes(SHARE))
    with tempfile.TemporaryDirectory() as directory:
        path = str(plan.save(Path(directory) / "plan.json"))
        free = _process(name, "eager", 0)
        held = max(free["held_bytes"], _process(name, path, 0, steps=0)["held_bytes"])
        limit = held + (plan.timeline.above_bytes + eager_above) // 2
        eager, planned = _process(name, "eager", limit), _process(name, path, limit)
        default = _process(name, path, limit, malloc={})
    yield Row(
        "hard_limit",
        {
            "case": name,
            "eager_above_bytes": eager_above,
            "planned_above_bytes": plan.timeline.above_bytes,
            "held_before_bytes": held,
            "limit_bytes": limit,
            "eager": eager["error"] or "finished",
            "planned": planned["error"] or f"finished {STEPS} optimizer steps",
            "planned, default malloc": default["error"] or f"finished {STEPS} optimizer steps",
        },
        (
            holds("eager finishes without the limit", not free["error"]),
            holds("eager dies under it for memory", "memory" in eager["error"].lower()),
            holds("planned finishes under it", not planned["error"]),
            holds("losses equal unlimited eager's", planned["losses"] == free["losses"]),
        ),
    )


def _build(name: str) -> ebbtide.Case:
    torch.manual_seed(0)
    return CASES[name]()


def _process(
    name: str, mode: str, limit: int, steps: int = STEPS, malloc: dict[str, str] = FIXED_MALLOC
) -> dict[str, Any]:
    """Train in a process of its own; ``mode`` is ``"eager"`` or the path of a plan file, 0 is no limit."""
    code = "import sys; from questions.hard_limit import train; train(*sys.argv[1:])"
    command = [sys.executable, "-c", code, name, mode, str(limit), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **malloc})
    seen: dict[str, Any] = {"error": "", "losses": [], "held_bytes": 0}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            seen.update(json.loads(line))
    if done.returncode and not seen["error"]:
        seen["error"] = f"exit {done.returncode}: {short_error(done.stderr.splitlines())}"
    return seen


def train(name: str, mode: str, limit: str, steps: str) -> None:
    """In the child: a few SGD steps under the limit; prints what was held before them and the losses."""
    torch.set_num_threads(1)
    case = _build(name)
    if mode != "eager":
        plan = ebbtide.Plan.load(mode)
        ebbtide.fit(case.model, plan)
    print(json.dumps({"held_bytes": _held_bytes()}), flush=True)
    if int(limit):
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    losses: list[str] = []
    try:
        for _ in range(int(steps)):
            clear(case.model)
            loss = case.model(*case.args)
            loss.backward()
            losses.append(float(loss.detach()).hex())
            del loss
            optimizer.step()
    except (MemoryError, RuntimeError) as error:
        print(json.dumps({"error": _in_short(error)}), flush=True)
        raise SystemExit(1) from error
    print(json.dumps({"losses": losses}), flush=True)


def _in_short(error: Exception) -> str:
    """What the allocator says, without the line of its own source."""
    text = str(error).strip() or "out of memory"
    return f"{type(error).__name__}: {text[max(text.find('DefaultCPUAllocator'), 0) :][:80]}"


def _held_bytes() -> int:
    """Private writable bytes of this process: what ``RLIMIT_DATA`` counts."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmData in /proc/self/status: this benchmark needs Linux")

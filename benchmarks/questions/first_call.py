"""What a first call costs: capture, costs, plan and proof against ``torch.compile(backend="aot_eager")``'s first call.

Each in a process of its own, in turns, CPU seconds of one thread from before the call to the return of its backward;
the least of the rounds counts. ``cold`` has no measured costs and no plan on disk, ``warm`` finds both; numba's
compiled planners are there in either. A *busy* machine has a process per core that computes all the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from harness.record import Row, at_most, holds

TITLE = "First call: CPU seconds against those of aot_eager, and what a busy machine adds"
CASES = ("bert-12L",)
QUICK = CASES
ROUNDS = 3
MOST_OF_COMPILE = 1.3
MOST_OF_QUIET = 1.5  # a busy machine's caches and clocks are shared


def rows(name: str, quick: bool) -> Iterator[Row]:
    runs: dict[str, list[dict[str, float]]] = {"aot_eager": [], "cold": [], "warm": [], "busy": []}
    _call(name, "ebbtide", None)  # compiles the planners
    for _ in range(1 if quick else ROUNDS):
        with tempfile.TemporaryDirectory() as caches:
            runs["aot_eager"].append(_call(name, "aot_eager", None))
            runs["cold"].append(_call(name, "ebbtide", caches))
            runs["warm"].append(_call(name, "ebbtide", caches))
        with tempfile.TemporaryDirectory() as caches, _busy():
            runs["busy"].append(_call(name, "ebbtide", caches))
    least = {key: min(each["cpu_seconds"] for each in found) for key, found in runs.items()}
    ours = [each for key, found in runs.items() if key != "aot_eager" for each in found]
    for key, found in runs.items():
        checks = {
            "aot_eager": (),
            "cold": (
                at_most("of aot_eager's", least["cold"] / least["aot_eager"], MOST_OF_COMPILE),
                holds("captured once", all(each["captures"] == 1 for each in ours)),
            ),
            "warm": (),
            "busy": (
                at_most("of a quiet machine's", least["busy"] / least["cold"], MOST_OF_QUIET),
                holds("as many ops run", len({each["op_runs"] for each in runs["cold"] + runs["busy"]}) == 1),
            ),
        }[key]
        yield Row(
            "first_call",
            {
                "case": name,
                "call": key,
                "cpu_seconds": least[key],
                "all cpu seconds": " ".join(f"{each['cpu_seconds']:.1f}" for each in found),
                "wall_seconds": min(each["wall_seconds"] for each in found),
                "of aot_eager": least[key] / least["aot_eager"],
                "ops tried out": found[0]["op_runs"],
            },
            checks,
        )


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """While open, every core has somebody else's work."""
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def _call(name: str, how: str, caches: str | None) -> dict[str, float]:
    """One first call in a child; ``caches`` holds measured costs and plans."""
    code = "import sys; from questions.first_call import first; first(*sys.argv[1:])"
    command = [sys.executable, "-c", code, name, how, caches or ""]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return json.loads(done.stdout.splitlines()[-1])


def first(name: str, how: str, caches: str) -> None:
    """In the child: print what the first call took."""
    import torch
    from torch._dynamo.utils import counters

    import ebbtide
    from ebbtide.cost import profile

    if caches:  # not numba's, whose place is fixed when it is imported
        import numba  # noqa: F401

        os.environ["XDG_CACHE_HOME"] = caches
    torch.set_num_threads(1)
    model, inputs = _bert()
    runs = _counted(profile)
    run: Any = torch.compile(model, backend="aot_eager") if how == "aot_eager" else ebbtide.fit(model, "80%")
    cpu, wall = time.process_time(), time.perf_counter()
    run(**inputs).loss.backward()
    taken = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}
    print(json.dumps({**taken, "captures": counters["stats"]["unique_graphs"], "op_runs": sum(runs)}))


def _counted(profile: Any) -> list[int]:
    """How often each op is timed, filled as that happens."""
    runs: list[int] = []
    plain = profile._profile_on_cpu

    def counted(call: Any, count: int) -> Any:
        runs.append(count + 2)
        return plain(call, count)

    profile._profile_on_cpu = counted
    return runs


def _bert() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes: dict[str, int] = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "vocab_size": 4096,
    }
    model = BertForMaskedLM(BertConfig(num_hidden_layers=12, **sizes)).train()
    tokens = torch.randint(0, sizes["vocab_size"], (4, 64))
    return model, {"input_ids": tokens, "labels": tokens}

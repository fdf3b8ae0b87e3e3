"""First calls, cold and warm, and new shapes, against those of ``torch.compile(backend="aot_eager")`` and older code.

1. Each start is a process of its own, in turns. CPU seconds of its one thread, from before a call to the return of its
   backward; the least of the rounds counts. What searches beside training is another process, and is not in it.
2. ``cold`` has no measured costs and no plans on disk, ``warm`` finds what ``cold`` has left. The planners' compiled
   kernels are there, as on any machine on which Ebbtide has planned before.
3. ``aot_eager`` captures and traces like any capture; what is above it is costs, plan, lowering and proof. It runs with
   ``dynamic=None``: its second shape is traced anew, from the third on one graph may serve.
4. *Quality*: what plans found quickly cost more than those of a full search (``Options(refine=False)``), in points.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.record import Check, Row, at_most

TITLE = "Starts: CPU seconds of first calls and new shapes, as eager steps and against aot_eager's"
OLD = "EBBTIDE_OLD_SOURCES"
"""An older commit and where it is checked out, ``COMMIT:PATH``; set by ``first_call.py --old``."""
CASES = (
    "readme", "gpt-24L 15%", "resnet50 70%", "bert 60%", "llama-lora 60%", "gpt2-50k 40%",
    "gpt-24L smallest", "gpt2-50k smallest",
)  # fmt: skip
QUICK = ("readme",)
ROUNDS = 2
COLD, WARM, SHAPE = (1.5, 5.0), (1.2, 2.0), (1.2, 2.0)
"""Times aot_eager's call, and eager steps besides, that a start may take."""
NEAR_COLD, NEAR_WARM = 30.0, 12.0
"""Eager steps that it may take near the smallest budget."""
ABOVE_SMALLEST = 1.02
_ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (128, 112, 96, 80, 64, 120, 104, 72)


def rows(name: str, quick: bool) -> Iterator[Row]:
    model, _, budget = name.partition(" ")
    if budget == "smallest":
        budget = str(int(ABOVE_SMALLEST * _child(model, "smallest", "1000%", None)["smallest_bytes"]))
    budget = budget or "50%"
    _child(model, "ebbtide", budget, None)  # compiles the planners
    found: dict[str, list[dict[str, Any]]] = {}
    old = os.environ.get(OLD)
    for _ in range(1 if quick else ROUNDS):
        with tempfile.TemporaryDirectory() as caches, tempfile.TemporaryDirectory() as others:
            found.setdefault("aot_eager", []).append(_child(model, "aot_eager", budget, None))
            for label in ("cold", "warm"):
                found.setdefault(label, []).append(_child(model, "ebbtide", budget, caches))
                if old is not None:
                    source = Path(old.partition(":")[2])
                    found.setdefault(f"{label}, old", []).append(_child(model, "ebbtide", budget, others, source))
    with tempfile.TemporaryDirectory() as caches:
        full = _child(model, "full", budget, caches)
    eager = min(each["eager"] for runs in found.values() for each in runs)
    aot = min(each["first"] for each in found["aot_eager"])
    trace = [min(each) for each in zip(*(run["shapes"] for run in found["aot_eager"]), strict=True)]
    for label, runs in found.items():
        first = min(run["first"] for run in runs)
        shapes = [min(each) for each in zip(*(run["shapes"] for run in runs), strict=True)]
        columns: dict[str, Any] = {
            "case": name,
            "start": label if ", old" not in label else f"{label} ({(old or '').partition(':')[0]})",
            "eager": eager,
            "first": first,
            "eager steps": first / eager,
            "of aot_eager": first / aot,
            "shapes": " ".join(f"{each:.2f}" for each in shapes),
        }
        if "overhead" in runs[0]:
            columns |= {"overhead": runs[0]["overhead"], "full overhead": full["overhead"]}
        yield Row("starts", columns, tuple(_checks(label, name, first, shapes, eager, aot, trace)))


def _checks(
    label: str, name: str, first: float, shapes: list[float], eager: float, aot: float, trace: list[float]
) -> Iterator[Check]:
    if label not in ("cold", "warm"):
        return
    if name.endswith("smallest"):
        most = NEAR_COLD if label == "cold" else NEAR_WARM
        yield at_most("eager steps", first / eager, most)
        return
    times, steps = COLD if label == "cold" else WARM
    yield at_most("first call", first, times * aot + steps * eager)
    if shapes:
        times, steps = SHAPE
        yield at_most("new shapes", sum(shapes), times * sum(trace) + steps * len(shapes) * eager)


def _child(model: str, how: str, budget: str, caches: str | None, source: Path = _ROOT) -> dict[str, Any]:
    """One start in a process of its own, of the library at ``source``; ``caches`` holds measured costs and plans."""
    code = "import sys; from questions.starts import start; start(*sys.argv[1:])"
    paths = [source / "src", source / "published" / "src", _ROOT / "benchmarks"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, "-c", code, model, how, budget, caches or empty]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{model}, {how}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


# -- in the child ---------------------------------------------------------------------------------------------


def start(name: str, how: str, budget: str, caches: str) -> None:
    """Print what the starts of one model took."""
    import numba  # noqa: F401  # whose caches' place is fixed when it is imported

    os.environ["XDG_CACHE_HOME"] = caches
    import torch

    import ebbtide

    torch.set_num_threads(1)
    model, batches = MODELS[name]()
    if how == "smallest":  # as a refused call names it, rewrites and all
        ebbtide.fit(model, "1MiB", progress=None)
        try:
            _step(model, batches[0])
        except ebbtide.errors.BudgetError as error:
            print(json.dumps({"smallest_bytes": error.smallest_bytes}))
        return
    eager = min(_step(model, batches[0]) for _ in range(3))
    run: Any = model
    if how == "aot_eager":
        run = torch.compile(model, backend="aot_eager")
    else:
        full = {"refine": False} if how == "full" else {}
        ebbtide.fit(
            model,
            int(budget) if budget.isdecimal() else budget,
            progress=None,
            options=ebbtide.Options(**full),
        )
    told: dict[str, Any] = {"eager": eager, "first": _step(run, batches[0])}
    if how != "aot_eager":
        plan = ebbtide.plan_of(model)
        assert plan is not None
        told["overhead"] = plan.overhead
    told["shapes"] = [_step(run, batch) for batch in batches[1:]]
    print(json.dumps(told))


def _step(model: Any, batch: Any) -> float:
    model.zero_grad()
    begin = time.process_time()
    outputs = model(**batch) if isinstance(batch, dict) else model(*batch)
    (outputs if hasattr(outputs, "backward") else outputs["loss"]).backward()
    return time.process_time() - begin


def _readme() -> tuple[Any, list[Any]]:
    """The README's classifier, deeper and on more images, so that a step is not all overhead."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Classifier(nn.Module):
        def __init__(self, width: int = 256, depth: int = 12, classes: int = 10) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
            self.head = nn.Linear(width, classes)

        def forward(self, images: Any, labels: Any) -> Any:
            for layer in self.layers:
                images = images + F.gelu(layer(images))
            return F.cross_entropy(self.head(images), labels)

    torch.manual_seed(0)
    batches = [(torch.randn(n, 256), torch.randint(10, (n,))) for n in (8192, 6144)]
    return Classifier(), batches


def _gpt(layers: int, width: int, heads: int, vocabulary: int, batches: tuple[int, ...]) -> tuple[Any, list[Any]]:
    import torch

    from ebbtide.zoo import GPTConfig, gpt

    torch.manual_seed(0)
    sizes = GPTConfig(vocabulary=vocabulary, length=256, layers=layers, width=width, heads=heads)
    cases = [gpt(batch, sizes) for batch in batches]
    return cases[0].model, [each.args for each in cases]


def _zoo(name: str, batches: tuple[int, ...]) -> tuple[Any, list[Any]]:
    import torch

    from ebbtide import zoo

    torch.manual_seed(0)
    cases = [getattr(zoo, name)(batch) for batch in batches]
    return cases[0].model.train(), [each.kwargs or each.args for each in cases]


def _lora() -> tuple[Any, list[Any]]:
    """A Llama of 8 layers with adapters on its attention, as PEFT makes them; batches of eight lengths."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        use_cache=False,
    )
    adapters = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), adapters).train()
    tokens = [torch.randint(4096, (8, length)) for length in LENGTHS]
    return model, [{"input_ids": each, "labels": each} for each in tokens]


MODELS: dict[str, Callable[[], tuple[Any, list[Any]]]] = {
    "readme": _readme,
    "gpt-24L": lambda: _gpt(24, 128, 4, 512, (8, 6)),
    "gpt2-50k": lambda: _gpt(4, 256, 4, 50257, (4, 3)),
    "resnet50": lambda: _zoo("resnet50", (16, 12)),
    "bert": lambda: _zoo("hf_bert", (8, 6)),
    "llama-lora": _lora,
}

"""Predicted against measured overhead: twelve models, four budgets, one and two threads.

1. The keep-all step and the planned ones are captured and planned once, from costs measured in the same process. Then
   all of them and eager take turns, each once in a round, in an order drawn anew for every round.
2. Seconds are CPU time with one thread and go by the clock with two, as those of the costs do.
3. An overhead is the median over rounds of the planned step's seconds over the keep-all step's of the same round,
   less 1: a prediction says what a plan adds to the same step without one. Its interval is that of the median by its
   order statistics, at 95 % and more whatever the distribution. Ratios to eager's step stand beside it.
4. Budgets are shares of the way from the smallest peak that was found to the unplanned one (``harness.grid``).
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import ebbtide
from ebbtide_published.zoo.small import SMALL
from harness.grid import captured
from harness.measuring import Times, clear
from harness.path_models import CASES as PATH_MODELS
from harness.record import Check, Row, at_least, at_most


class Classifier(nn.Module):
    """The README's."""

    def __init__(self, width: int = 256, depth: int = 12, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            images = images + F.gelu(layer(images))
        return F.cross_entropy(self.head(images), labels)


def _readme() -> ebbtide.Case:
    return ebbtide.Case(Classifier(), (torch.randn(4096, 256), torch.randint(10, (4096,))), name="readme")


TITLE = "Predicted against measured overhead over the keep-all step, all methods in turns"
MODELS: dict[str, Callable[[], ebbtide.Case]] = {
    "readme": _readme,
    "chain-64": PATH_MODELS["chain-64"],
    **{
        name: SMALL[name]
        for name in ("gpt", "hf_bert", "hf_gpt2", "hf_t5", "hf_llama", "llama_70b_lora", "resnet50", "densenet121")
    },
    **{name: SMALL[name] for name in ("unet", "vgg16")},
}
THREADS = {"1 thread": 1, "2 threads": 2}
CASES = tuple(f"{model}, {threads}" for threads in THREADS for model in MODELS)
QUICK = ("chain-64, 1 thread",)
SHARES = (0.75, 0.5, 0.25, 0.05)
ROUNDS = 15
EFFORT = 2_000
"""Moves of the search: whether a plan's seconds are true does not hang on how good it is."""
LEAST_NEAR, NEAR, FARTHEST = 0.9, 0.03, 0.06
"""Of all plans this share is predicted within NEAR, or within the measurement's own interval; all within FARTHEST."""
KEEP_ALL, EAGER = "keep all", "eager"


def rows(name: str, quick: bool) -> Iterator[Row]:
    model, threads = name.split(", ")
    torch.set_num_threads(THREADS[threads])
    clock = time.process_time if THREADS[threads] == 1 else time.perf_counter
    known = captured(built(model))
    plans = {KEEP_ALL: known.keep_all} | {
        f"{share:.0%}": known.plan(known.grid_bytes(share), EFFORT) for share in SHARES
    }
    methods = {EAGER: built(model)} | {label: fitted(model, plan) for label, plan in plans.items()}
    times, faults = in_turns(methods, 3 if quick else ROUNDS, clock)
    for label, plan in plans.items():
        seen, low, high = times[label], *times[label].median_ratio_interval(times[KEEP_ALL])
        measured = seen.median_ratio(times[KEEP_ALL]) - 1
        error = measured - plan.overhead
        columns = {
            "case": name,
            "budget": label,
            "peak_of_unplanned": plan.timeline.above_bytes / known.unplanned_above_bytes,
            "predicted": plan.overhead,
            "measured": measured,
            "low": low - 1,
            "high": high - 1,
            "error": error,
            "over_eager": seen.median_ratio(times[EAGER]),
            "predicted_seconds": plan.step_seconds,
            "median_seconds": seen.median,
            "page_faults": faults[label],
            "eager_page_faults": faults[EAGER],
            "near": abs(error) <= NEAR or low - 1 <= plan.overhead <= high - 1,
        }
        checks = () if label == KEEP_ALL else (at_most("|measured - predicted|", abs(error), FARTHEST),)
        yield Row("overhead", columns, checks)


def summary(found: Sequence[Row]) -> Iterator[Row]:
    """How many plans are predicted near enough."""
    for threads in THREADS:
        own = [
            row.columns
            for row in found
            if row.columns["case"].endswith(f", {threads}") and row.columns["budget"] != KEEP_ALL
        ]
        if own:
            near = sum(each["near"] for each in own) / len(own)
            columns = {
                "case": f"all, {threads}",
                "plans": len(own),
                "near": near,
                "error": max((each["error"] for each in own), key=abs),
            }
            checks: tuple[Check, ...] = (at_least("within 3 points or the interval", near, LEAST_NEAR),)
            yield Row("overhead", columns, checks)


def built(model: str) -> ebbtide.Case:
    """The model and its inputs, the same each time."""
    torch.manual_seed(0)
    return MODELS[model]()


def fitted(model: str, plan: ebbtide.Plan) -> ebbtide.Case:
    """The model under ``plan``, its first (proven) and second (measured) step behind it."""
    case = built(model)
    ebbtide.fit(case.model, plan, progress=None)
    for _ in range(2):
        _step(case, time.process_time)
    return case


def _step(case: ebbtide.Case, clock: Callable[[], float]) -> float:
    """Seconds of forward and backward from no gradients."""
    clear(case.model)
    begin = clock()
    outputs: Any = case.model(*case.args, **(case.kwargs or {}))
    (outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]).backward()
    spent = clock() - begin
    del outputs
    clear(case.model)
    return spent


def in_turns(
    methods: dict[str, ebbtide.Case], rounds: int, clock: Callable[[], float]
) -> tuple[dict[str, Times], dict[str, int]]:
    """Seconds of each method's step in each round, and the median number of its page faults; one round goes before."""
    drawn, labels = random.Random(0), list(methods)
    seconds: dict[str, list[float]] = {label: [] for label in labels}
    faults: dict[str, list[int]] = {label: [] for label in labels}
    for turn in range(rounds + 1):
        drawn.shuffle(labels)
        for label in labels:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            spent = _step(methods[label], clock)
            if turn:
                seconds[label].append(spent)
                faults[label].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    times = {label: Times(tuple(values)) for label, values in seconds.items()}
    return times, {label: sorted(values)[len(values) // 2] for label, values in faults.items()}

"""What capture alone costs, per model: the captured step that keeps everything against eager, CPU time and peak.

Beside it the same for ``torch.compile(backend="aot_eager")``, PyTorch's own capture run op by op: what both pay is the
price of a captured step that runs from Python, op by op. Peaks of models that eager runs with more memory say so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

import ebbtide
from ebbtide.zoo import GPTConfig, gpt, resnet50
from ebbtide_published.zoo.small import SMALL
from harness.measuring import Times
from harness.record import Row, at_most
from questions.zoo import CAUSES

TITLE = "Captured keep-all against eager, one thread, interleaved"
FULL_SIZE = {
    "resnet50 at full size": partial(resnet50, 8),
    "gpt at full width": partial(
        gpt, 4, GPTConfig(vocabulary=8192, length=256, layers=4, width=768, heads=12, dropout=0.1)
    ),
}
CASES = (*SMALL, *FULL_SIZE)
QUICK = ("resnet50",)
ROUNDS = 7
MOST_TIME, MOST_PEAK = 1.08, 1.01


def rows(name: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    eager, captured, peer = ({**SMALL, **FULL_SIZE}[name]() for _ in range(3))
    ebbtide.fit(captured.model, "1000%", options=ebbtide.Options(planner="keep_all", verify=False))
    peer.model.compile(backend="aot_eager")
    methods = {"eager": eager, "captured": captured, "aot_eager": peer}
    for case in methods.values():
        _step(case)  # captures, sets up kernels
    operations = len(_plan_of(captured).program.ops)
    peaks = {label: _peak(case) for label, case in methods.items()}
    seconds: dict[str, list[float]] = {label: [] for label in methods}
    for _ in range(3 if quick else ROUNDS):
        for label, case in methods.items():
            seconds[label].append(_step(case))
    times = {label: Times(tuple(values)) for label, values in seconds.items()}
    time_ratio = times["captured"].best_ratio(times["eager"])
    columns = {
        "case": name,
        "eager_seconds_best": times["eager"].best,
        "over_eager_best": time_ratio,
        "over_eager_median": times["captured"].median_ratio(times["eager"]),
        "aot_eager_over_eager_best": times["aot_eager"].best_ratio(times["eager"]),
        "ops": operations,
        "added_microseconds_per_op": (times["captured"].best - times["eager"].best) / operations * 1e6,
        "eager_peak_bytes": peaks["eager"],
        "peak_over_eager": peaks["captured"] / peaks["eager"],
    }
    checks = [at_most("of eager's peak", columns["peak_over_eager"], MOST_PEAK)]
    if name in CAUSES:
        columns["why"] = "eager runs each layer of nn.LSTM as one fused call, captured cell by cell"
    else:
        checks.append(at_most("of eager's CPU time", time_ratio, MOST_TIME))
    yield Row("keep_all", columns, tuple(checks))


def _plan_of(case: ebbtide.Case) -> ebbtide.Plan:
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    return plan


def _loss(case: ebbtide.Case) -> torch.Tensor:
    outputs = case.model(*case.args, **(case.kwargs or {}))
    return outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]


def _step(case: ebbtide.Case) -> float:
    """CPU seconds of forward and backward from no gradients."""

    case.model.zero_grad()
    begin = time.process_time()
    _loss(case).backward()
    return time.process_time() - begin


def _peak(case: ebbtide.Case) -> int:
    case.model.zero_grad()
    with ebbtide.measure(case.model) as gauge:
        _loss(case).backward()
    return gauge.above_bytes

"""What capture alone costs, per model: the captured step that keeps everything against eager, CPU time and peak."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

import ebbflow
from ebbflow.zoo.small import SMALL
from harness.measuring import Times
from harness.record import Row, at_most
from questions.zoo import CAUSES

TITLE = "Captured keep-all against eager, one thread, interleaved"
CASES = tuple(SMALL)
QUICK = ("resnet50",)
ROUNDS = 7
MOST_TIME, MOST_PEAK = 1.08, 1.01


def rows(name: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    eager, captured = (SMALL[name]() for _ in range(2))
    ebbflow.fit(captured.model, "1000%", planner="keep_all", verify=False)
    methods = {"eager": eager, "captured": captured}
    for case in methods.values():
        _step(case)  # captures, sets up kernels
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
        "eager_peak_bytes": peaks["eager"],
        "peak_over_eager": peaks["captured"] / peaks["eager"],
    }
    checks = [at_most("of eager's peak", columns["peak_over_eager"], MOST_PEAK)]
    if name in CAUSES:
        columns["why"] = "eager runs each layer of nn.LSTM as one fused call, captured cell by cell"
    else:
        checks.append(at_most("of eager's CPU time", time_ratio, MOST_TIME))
    yield Row("keep_all", columns, tuple(checks))


def _loss(case: ebbflow.Case) -> torch.Tensor:
    outputs = case.model(*case.args, **(case.kwargs or {}))
    return outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]


def _step(case: ebbflow.Case) -> float:
    """CPU seconds of forward and backward from no gradients."""

    case.model.zero_grad()
    begin = time.process_time()
    _loss(case).backward()
    return time.process_time() - begin


def _peak(case: ebbflow.Case) -> int:
    case.model.zero_grad()
    with ebbflow.measure(case.model) as gauge:
        _loss(case).backward()
    return gauge.above_bytes

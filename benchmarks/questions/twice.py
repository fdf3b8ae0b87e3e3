"""Two first calls of one step: do their plans take the same?

Ops are timed and the step is planned twice, each time in a process of its own without anything on disk, as two users of
one machine would. Then the step runs under both plans in turns, each once in a round, in an order drawn anew for every
round. The ratio is the median over rounds of the second plan's CPU seconds over the first's of the same round, its
interval that of the median by its order statistics.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import ebbtide
from harness.record import Row, at_most
from questions.overhead import built, fitted, in_turns

TITLE = "Plans of two first calls on one machine: CPU seconds of the second's step over the first's"
MODELS = {"readme": "50%", "chain-64": "50%", "gpt": "50%", "hf_bert": "50%"}
CASES = tuple(f"{model} {budget}" for model, budget in MODELS.items())
QUICK = ("chain-64 50%",)
ROUNDS = 25
MOST_APART = 0.03
_PLAN = "import sys; from questions.twice import save_plan; save_plan(*sys.argv[1:])"


def rows(name: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    model, _, budget = name.partition(" ")
    plans = [_planned_elsewhere(model, budget) for _ in range(2)]
    methods = {str(each): fitted(model, plan) for each, plan in enumerate(plans)}
    times, _ = in_turns(methods, 3 if quick else ROUNDS, time.process_time)
    low, high = times["1"].median_ratio_interval(times["0"])
    ratio = times["1"].median_ratio(times["0"])
    columns = {
        "case": name,
        "predicted": plans[0].overhead,
        "predicted_again": plans[1].overhead,
        "same_schedule": plans[0].schedule == plans[1].schedule,
        "ratio": ratio,
        "low": low,
        "high": high,
    }
    yield Row("twice", columns, (at_most("plans apart", abs(ratio - 1), MOST_APART),))


def _planned_elsewhere(model: str, budget: str) -> ebbtide.Plan:
    """The plan of a process that knows nothing of this machine."""
    with tempfile.TemporaryDirectory() as empty:
        path = Path(empty) / "plan.json"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": empty}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        subprocess.run([sys.executable, "-c", _PLAN, model, budget, str(path)], check=True, env=environment)
        return ebbtide.Plan.load(path)


def save_plan(model: str, budget: str, path: str) -> None:
    """In the child: plan the step of ``model`` within ``budget`` and write the plan to ``path``."""
    torch.set_num_threads(1)
    case = built(model)
    options = ebbtide.Options(progress=None)
    ebbtide.plan(case.model, case.args, case.kwargs, budget=budget, name=model, options=options).save(path)

"""The reports of the gallery, as ``make docs`` makes them: plans for cards of the catalogue, nothing of which runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import ebbtide
from ebbtide import zoo
from ebbtide.zoo import GPTConfig

GPT = GPTConfig(vocabulary=8192, length=512, layers=6, width=512, heads=8)
OPTIONS = ebbtide.Options(effort=2000, progress=None)
REPORTS: dict[str, tuple[Callable[[], ebbtide.Case], list[str], ebbtide.Options]] = {
    "recompute": (partial(zoo.gpt, 16, GPT), ["50%", "75%"], replace(OPTIONS, machine="t4-16gb")),
    "batch-norm": (partial(zoo.resnet50, 64), ["50%", "75%"], replace(OPTIONS, machine="v100-16gb")),
    "hybrid": (partial(zoo.unet, 8), ["90%"], replace(OPTIONS, machine="v100-16gb", tiers="host")),
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, (build, budgets, options) in REPORTS.items():
        with torch.device("meta"):
            case = build()
        plans = ebbtide.sweep(case.model, case.args, budgets=budgets, name=case.name, options=options)
        plans[0].save_html(folder / f"{name}.html", others=plans[1:])
        print(f"{folder / name}.html")

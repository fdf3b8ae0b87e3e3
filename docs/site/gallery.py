"""The reports of the gallery, as ``make docs`` makes them: plans for cards of the catalogue, nothing of which runs."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

import ebbtide
from ebbtide import zoo
from ebbtide.zoo import GPTConfig

GPT = GPTConfig(vocabulary=8192, length=512, layers=6, width=512, heads=8)
REPORTS = {
    "recompute": (partial(zoo.gpt, 16, GPT), {"machine": "t4-16gb", "budgets": ["50%", "75%"]}),
    "batch-norm": (partial(zoo.resnet50, 64), {"machine": "v100-16gb", "budgets": ["50%", "75%"]}),
    "hybrid": (partial(zoo.unet, 8), {"machine": "v100-16gb", "budgets": ["90%"], "tiers": "host"}),
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, (build, options) in REPORTS.items():
        with torch.device("meta"):
            case = build()
        plans = ebbtide.sweep(
            case.model, case.args, name=case.name, options=ebbtide.Options(effort=2000, progress=None, **options)
        )
        plans[0].save_html(folder / f"{name}.html", others=plans[1:])
        print(f"{folder / name}.html")

"""The largest batch on a 16 GiB V100 at one extra forward or less, counted as Checkmate's authors count (§6.4)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ebbtide._api.batches import largest, one_forward
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.step.machine import machine_named
from harness.layer_graphs import NETWORKS, LayerGraph
from harness.planned import plan_with
from harness.record import Row, at_least

TITLE = "Largest batch, v100-16gb, FLOP costs, at most one extra forward, counted as in the paper"
CASES = ("unet", "fcn8", "segnet", "vgg19", "resnet50", "mobilenet")
QUICK = ("vgg19",)
PLANNERS = ("keep_all", "ap_sqrt", "ap_greedy", "linearized_sqrt", "linearized_greedy", "greedy", "auto")
TARGETS = {"unet": 61, "fcn8": 60, "segnet": 62, "vgg19": 289, "resnet50": 193, "mobilenet": 1105}
# What the paper's text and README give for keeping everything; they say it was extrapolated linearly.
PAPER_KEEP_ALL = {"unet": 16, "vgg19": 167, "mobilenet": 215}
EFFORT = 5_000


def rows(name: str, quick: bool) -> Iterator[Row]:
    graph = NETWORKS[name]()
    budget = machine_named("v100-16gb").memory_bytes
    one, _ = floor_bytes(graph.program(1))
    most = _largest_at(graph, budget, one)
    kept = 0
    for planner in PLANNERS:
        begin = time.perf_counter()
        batch = largest(lambda b, p=planner: _fits(graph, b, budget, p), max(kept, 1))
        kept = kept or batch
        planned = plan_with(planner, graph.program(batch), budget - graph.constant_bytes(batch), effort=EFFORT)
        yield Row(
            "max_batch",
            {
                "case": name,
                "planner": planner,
                "batch": batch,
                "over_keep_all": batch / kept,
                "over_the_papers_keep_all": batch / PAPER_KEEP_ALL[name] if name in PAPER_KEEP_ALL else None,
                "overhead": planned.overhead,
                "limit": one_forward(graph.program(1)),
                "no_plan_can_exceed": most,
                "paper": TARGETS[name]
                if planner == "auto"
                else PAPER_KEEP_ALL.get(name)
                if planner == "keep_all"
                else None,
                "seconds": time.perf_counter() - begin,
            },
            (at_least("batch", batch, TARGETS[name]),) if planner == "auto" else (),
        )


def _largest_at(graph: LayerGraph, budget: int, bytes_per_sample: int) -> int:
    """The largest batch at which ``bytes_per_sample`` above the constants fit."""
    return largest(lambda batch: graph.constant_bytes(batch) + batch * bytes_per_sample <= budget)


def _fits(graph: LayerGraph, batch: int, budget: int, planner: str) -> bool:
    program = graph.program(batch)
    planned = plan_with(planner, program, budget - graph.constant_bytes(batch), effort=EFFORT)
    return planned.overhead is not None and planned.overhead <= one_forward(program)

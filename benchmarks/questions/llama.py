"""What planning a card's step from a laptop takes: Llama at full size, captured without memory for a card.

CPU seconds of the one process, which are its seconds on a core of its own; seconds by the wall stand beside them.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from ebbtide.capture.offline import capture
from ebbtide.capture.without_memory import without_memory
from ebbtide.case import Case
from ebbtide.cost.attach import with_roofline_costs
from ebbtide.cost.cache import device_context
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.step.machine import Machine, machine_named
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.units import Budget
from ebbtide.zoo import llama_8b, llama_70b
from harness.record import Check, Row, at_most

TITLE = "Llama for an H100: capture and plan of one step, on one core"
TOKENS = 8192
SHARES = (0.5, 0.2, 0.05)
"""Of what lies between the smallest workable budget and the unplanned peak."""
MOST_SECONDS, MOST_GIB = 90.0, 4.0
"""Of the largest step, for capture, costs and one plan together."""


def _hugging_face(layers: int, width: int, hidden: int, heads: int) -> Case:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        use_cache=False,
    )
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return Case(model.train(), kwargs={"input_ids": tokens, "labels": tokens})


MODELS: dict[str, Callable[[], Case]] = {
    "llama_8b": partial(llama_8b, TOKENS),
    "llama_70b": partial(llama_70b, TOKENS),
    "hf_llama_8b": partial(_hugging_face, 32, 4096, 14_336, 32),
    "hf_llama_70b": partial(_hugging_face, 80, 8192, 28_672, 64),
}
CASES = tuple(MODELS)
QUICK = ("llama_8b",)


class _Clock:
    """CPU and wall seconds since the last look."""

    def __init__(self) -> None:
        self._last = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def look(self) -> tuple[float, float]:
        before, self._last = self._last, self._now()
        return self._last[0] - before[0], self._last[1] - before[1]


def _large(machine: Machine) -> Machine:
    """The card as if it held any model: the question is what planning takes, not whether 70B fits."""
    return replace(machine, name=f"{machine.name}, any size", memory_bytes=0)


def rows(name: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    machine = _large(machine_named("h100-80gb"))
    with without_memory():
        case = MODELS[name]()
    clock = _Clock()
    joint = capture(
        case.model,
        case.args,
        case.kwargs,
        name=name,
        granularity_bytes=machine.granularity_bytes,
        context=device_context("cpu"),
        here=False,
        cuda=machine.compute_capability,
    )
    captured = clock.look()
    nodes = len(joint.graph.nodes)
    program = with_roofline_costs(joint.program, joint.calls, machine)
    del joint
    costed = clock.look()
    smallest, _ = smallest_of(program)
    searched = clock.look()
    unplanned = unplanned_bytes(program)
    for share in SHARES[:1] if quick else SHARES:
        clock.look()
        above = int(smallest + share * (unplanned - smallest))
        plan = make_plan(program, Budget(bytes=above), resident_bytes=0, options=PlanningOptions(machine=machine))
        planned = clock.look()
        parts = (captured, costed, searched, planned)
        seconds, by_the_wall = (sum(part[i] for part in parts) for i in (0, 1))
        gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        checks: tuple[Check, ...] = ()
        if name == "hf_llama_70b":
            checks = (at_most("CPU seconds", seconds, MOST_SECONDS), at_most("GiB", gib, MOST_GIB))
        yield Row(
            "llama",
            {
                "case": name,
                "nodes": nodes,
                "ops": len(program.ops),
                "share": share,
                "budget_gib": above / 2**30,
                "unplanned_gib": unplanned / 2**30,
                "capture_seconds": captured[0],
                "cost_seconds": costed[0],
                "smallest_seconds": searched[0],
                "plan_seconds": planned[0],
                "seconds": seconds,
                "wall_seconds": by_the_wall,
                "peak_gib": gib,
                "overhead": plan.overhead,
                "bound": plan.bound,
            },
            checks,
        )

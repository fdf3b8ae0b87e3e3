"""Language models for cards that are not at hand, as captured and with rewrites: least budgets, overheads and bounds.

Llama 3 8B trains all its weights in bfloat16 on one sequence of 16,384 tokens; the others train adapters of rank 16
with AdamW on one of 4,096 (``docs/lora.md``), their heads frozen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import ebbtide
from ebbtide import Case
from ebbtide._api.estimate import capture_ahead
from ebbtide.capture.without_memory import without_memory
from ebbtide.errors import BudgetError
from ebbtide.options import Options
from ebbtide.planning.pipeline import PlanningOptions
from ebbtide.step.machine import machine_named
from ebbtide.units import Budget
from ebbtide.zoo import llama_8b
from harness.record import Check, Row, at_most, holds

TITLE = "Cards of the catalogue: least budget, overhead and bound, as captured, with rewrites, and with the host memory"
_GIB = 2**30


def _adapted(kind: str, **sizes: Any) -> Case:
    import peft
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes, use_cache=False)
    base = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    adapters = peft.LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.05, task_type="CAUSAL_LM")
    ids = torch.zeros(1, 4096, dtype=torch.long)
    return Case(peft.get_peft_model(base, adapters).train(), kwargs={"input_ids": ids, "labels": ids})


def _sizes(width: int, layers: int, heads: int, keys: int, hidden: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": hidden,
        "vocab_size": vocabulary,
    }


@dataclass(frozen=True)
class _Model:
    """A case and what is asked of it.

    Attributes:
        build: it.
        machine: of the catalogue.
        optimizer: whose state counts.
        budget_bytes: at which overhead and bound are given; ``None`` is what the card can use.
        most_bytes: for the least budget that the exact tier is to reach; ``None`` where none is named.
        most_overhead: at the budget, by recomputation alone.
    """

    build: Callable[[], Case]
    machine: str
    optimizer: Callable[..., torch.optim.Optimizer] | None
    budget_bytes: int | None
    most_bytes: int | None = None
    most_overhead: float | None = None


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])


MODELS = {
    "llama-8b, all weights, 16k, h100-80gb": _Model(
        partial(llama_8b, 16_384), "h100-80gb", None, 74 * _GIB, most_bytes=33 * _GIB
    ),
    "qwen2.5-7b, lora, 4k, rtx4090-24gb": _Model(
        partial(_adapted, "Qwen2", **_sizes(3584, 28, 28, 4, 18944, 152064)), "rtx4090-24gb", _adamw, None, None, 0.20
    ),
    "llama-3-8b, lora, 4k, rtx4090-24gb": _Model(
        partial(_adapted, "Llama", **_sizes(4096, 32, 32, 8, 14336, 128256)), "rtx4090-24gb", _adamw, None, None, 0.25
    ),
    "mistral-7b, lora, 4k, rtx4090-24gb": _Model(
        partial(_adapted, "Mistral", **_sizes(4096, 32, 32, 8, 14336, 32000)), "rtx4090-24gb", _adamw, None, None, 0.12
    ),
}
CASES = tuple(MODELS)
QUICK = CASES[-1:]


def rows(case: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    asked = MODELS[case]
    machine = machine_named(asked.machine)
    with without_memory():
        made = asked.build()
    budget = asked.budget_bytes or machine.usable_bytes
    ways = {"as captured": ("none", None), "rewrites": ("exact", None), "rewrites, host": ("exact", "host")}
    for way, (rewrites, tiers) in ways.items():
        options = Options(optimizer=asked.optimizer, machine=machine, tiers=tiers, rewrites=rewrites, progress=None)
        begin = time.process_time()
        step = capture_ahead(made.model, made.args, made.kwargs, options=options, name=case)
        captured = time.process_time() - begin
        plan, refused = _planned(step, budget, options)
        yield _row(case, way, budget, plan, refused, captured, time.process_time() - begin - captured)
        if way == "rewrites" and asked.most_bytes is not None:
            plan, refused = _planned(step, asked.most_bytes, options)
            yield _row(case, way, asked.most_bytes, plan, refused, captured, None)


def _planned(step: Any, budget: int, options: Options) -> tuple[ebbtide.Plan | None, BudgetError | None]:
    try:
        return step.plan(Budget(bytes=budget), PlanningOptions.of(options)), None
    except BudgetError as error:
        return None, error


def _row(
    case: str,
    way: str,
    budget: int,
    plan: ebbtide.Plan | None,
    refused: BudgetError | None,
    capture_seconds: float,
    plan_seconds: float | None,
) -> Row:
    asked = MODELS[case]
    smallest = plan.smallest_bytes if plan is not None else refused.smallest_bytes if refused is not None else None
    checks: list[Check] = []
    if way == "rewrites" and budget == asked.most_bytes:
        checks.append(holds("a plan within the target's budget", plan is not None))
    if way == "rewrites" and asked.most_overhead is not None:
        overhead = plan.overhead if plan is not None else float("inf")
        forbidden = plan is not None and plan.bound is not None and plan.bound > asked.most_overhead
        if forbidden:
            checks.append(holds(f"a bound forbids {asked.most_overhead:.0%}", True))
        else:
            checks.append(at_most("overhead", overhead, asked.most_overhead))
    rewrites = "" if plan is None or plan.rewritten is None else "; ".join(map(str, plan.rewritten.rewrites))
    return Row(
        "cards",
        {
            "case": case,
            "way": way,
            "budget_gib": budget / _GIB,
            "resident_gib": None if plan is None else plan.resident_bytes / _GIB,
            "unplanned_gib": None if plan is None else plan.baseline_peak_bytes / _GIB,
            "smallest_gib": None if smallest is None else smallest / _GIB,
            "overhead": None if plan is None else plan.overhead,
            "bound": None if plan is None else plan.bound,
            "rewrites": rewrites,
            "capture_cpu_seconds": capture_seconds,
            "plan_cpu_seconds": plan_seconds,
        },
        tuple(checks),
    )

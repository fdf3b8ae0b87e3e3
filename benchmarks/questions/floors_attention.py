"""Attention by products and a softmax on this CPU: peak and CPU time of ours at several budgets, beside checkpoints.

Hugging Face's GPT-2 with ``attn_implementation="eager"``, four layers of the smallest width, one sequence of 1,024
tokens, no dropout: scores and probabilities are 48 MiB each, kept per layer and several at once in its backward. As a
language model it is pinned by its head, and then by the gradient of the words; as a classifier with frozen words by
attention. All methods are of one model, run interleaved in one process at one thread, each held against eager's loss
and gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import ebbtide
from ebbtide.errors import BudgetError
from ebbtide.measurement.resident import resident_bytes
from harness.measuring import Times, above_bytes, clear, interleaved, step
from harness.record import Check, Row, at_most, holds

TITLE = (
    "Attention by products and a softmax: peak above the step's start, CPU seconds and bits against eager (one thread)"
)
CASES = ("hf-gpt2-4L-t1024", "hf-gpt2-classifier-4L-t1024")
QUICK = ("hf-gpt2-1L-t128",)
SIZES = {
    "hf-gpt2-4L-t1024": {"n_layer": 4, "n_positions": 1024},
    "hf-gpt2-classifier-4L-t1024": {"n_layer": 4, "n_positions": 1024, "pad_token_id": 0},
    "hf-gpt2-1L-t128": {"n_layer": 1, "n_positions": 128, "n_embd": 96, "n_head": 4, "vocab_size": 2048},
}
SHARES = {"hf-gpt2-4L-t1024": (0.6, 0.4), "hf-gpt2-1L-t128": (0.6,)}
"""Of eager's peak above the start."""
LOWER = (0.6, 0.4, 0.3)
ROUNDS = 3


def _model(case: str) -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

    torch.manual_seed(0)
    without = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    config = GPT2Config(**SIZES[case], **without, use_cache=False)
    config._attn_implementation = "eager"
    if "classifier" not in case:
        return GPT2LMHeadModel(config)
    model = GPT2ForSequenceClassification(config)
    model.transformer.wte.requires_grad_(False)
    return model


class _WithLoss(nn.Module):
    """Returns the loss alone, as eager's peak is then that of the step."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        labels = tokens if hasattr(self.inner, "lm_head") else tokens[:, 0] % 2
        return self.inner(input_ids=tokens, labels=labels).loss  # type: ignore[operator]


def _bits(model: nn.Module, args: Any, expected: list[torch.Tensor] | None) -> Any:
    """Loss and gradients of a step; or whether they are ``expected``."""
    clear(model)
    loss = model(*args)
    loss.backward()
    found = [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]
    clear(model)
    return found if expected is None else all(map(torch.equal, found, expected))


def _another(model: nn.Module) -> nn.Module:
    """The same with the same parameters' memory."""
    known = {id(each): each for each in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, known)


def rows(case: str, quick: bool) -> Iterator[Row]:
    """One row per method."""
    torch.set_num_threads(1)
    model = _WithLoss(_model(case))
    args = (torch.randint(model.inner.config.vocab_size, (1, SIZES[case]["n_positions"])),)  # type: ignore[union-attr]
    methods: dict[str, tuple[nn.Module, Callable[..., Any]]] = {"eager": (model, model)}
    checkpointed = _another(model)
    checkpointed.inner.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator, union-attr]
    checkpointed.train()
    methods["checkpoint per block"] = (checkpointed, checkpointed)
    eager_peak = above_bytes(model, model, args)
    expected = _bits(model, args, None)
    plans: dict[str, ebbtide.Plan] = {}
    reasons: dict[str, str] = {}
    for share in SHARES.get(case, LOWER):
        label = f"ebbtide {share:.0%}"
        fitted = _another(model)
        budget = resident_bytes([fitted, args]) + int(share * eager_peak)
        try:
            ebbtide.plan(
                fitted, args, budget=budget, options=ebbtide.Options(progress=None)
            )  # finds out in all room what it rests on
            ebbtide.fit(fitted, budget, progress=None)
            for _ in range(2):  # the first step is proven, the second measured
                step(fitted, args)
                clear(fitted)
        except BudgetError as error:
            reasons[label] = str(error)[:160]
            continue
        plan = ebbtide.plan_of(fitted)
        assert plan is not None
        plans[label], methods[label] = plan, (fitted, fitted)
    equal = {key: _bits(each, args, expected) for key, (each, _) in methods.items()}
    del expected
    peaks = {key: above_bytes(each, run, args) for key, (each, run) in methods.items()}
    times = interleaved(methods, args, 2 if quick else ROUNDS)
    for label in methods:
        yield _row(case, label, peaks, times, equal[label], plans.get(label))
    for label, reason in reasons.items():
        checks = () if quick else (holds("a plan was found", False),)
        yield Row("attention", {"case": case, "method": label, "not_run": reason}, checks)


def _row(
    case: str,
    label: str,
    peaks: dict[str, int],
    times: dict[str, Times],
    equal: bool,
    plan: ebbtide.Plan | None,
) -> Row:
    of_eager = peaks[label] / peaks["eager"]
    checks: list[Check] = []
    if plan is not None:
        share = float(label.removeprefix("ebbtide ").removesuffix("%")) / 100
        checks += [holds("eager's bits", equal), at_most("peak of eager's", of_eager, share)]
    rewritten = () if plan is None or plan.rewritten is None else plan.rewritten.rewrites
    columns = {
        "case": case,
        "method": label,
        "bits": "eager's" if equal else "others",
        "peak_bytes": peaks[label],
        "of_eager": of_eager,
        "cpu_seconds_best": times[label].best,
        "cpu_ratio_best": times[label].best_ratio(times["eager"]),
        "cpu_ratio_median": times[label].median_ratio(times["eager"]),
        "predicted_overhead": None if plan is None else plan.overhead,
        "bound": None if plan is None else plan.bound,
        "plan_seconds": None if plan is None else plan.plan_seconds,
        "rewrites": ", ".join(sorted({f"{each.rule}: {each.form}" for each in rewritten})),
    }
    return Row("attention", columns, tuple(checks))

"""GPT-2's head on this CPU: peak and CPU time of ours at several budgets and of everybody else who lowers it.

Four layers of GPT-2's smallest width, 8 sequences of 256 tokens, 50,257 words: N x V is 393 MiB, and eager has three of
them at once. All methods have the same parameters, run interleaved in one process at one thread, and each is held
against eager's loss and gradients: the same bits, or how far off, as a share of a tensor's largest number.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.errors import BudgetError
from ebbtide.measurement.resident import resident_bytes
from ebbtide.zoo.gpt import GPT, GPTConfig, gpt
from harness.measuring import Times, above_bytes, clear, interleaved, step
from harness.record import Check, Row, at_most, holds

TITLE = "GPT-2's head: peak above the step's start, CPU seconds and bits, against eager in the same run (one thread)"
CONFIGS = {
    "gpt2-4L-v50257": (8, GPTConfig(vocabulary=50257, length=256, layers=4, width=768, heads=12)),
    "gpt2-1L-v8192": (2, GPTConfig(vocabulary=8192, length=128, layers=1, width=128, heads=4)),
}
CASES = ("gpt2-4L-v50257",)
QUICK = ("gpt2-1L-v8192",)
TARGETS = {0.37: 1.10, 0.27: 1.30}
"""Share of eager's peak above the start, and most CPU time, times eager's."""
SHARES = (0.60, 0.37, 0.27)
REWRITES: dict[float, Any] = {0.27: "in-place"}
"""Where the default has no plan: the weight's gradient and the embedding's, which are one tensor, are added."""
MEMORY_BUDGETS = (0.2,)
ROUNDS = 3


class _Chunked(GPT):
    """The loss by somebody's linear and cross-entropy in chunks: torch's own by options, or another's."""

    options: Any = None
    fused: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Of weight, hidden states and labels."""
    every_block = False

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.every_block else block(x)  # type: ignore[assignment]
        hidden = self.norm(x).flatten(0, 1)
        if self.fused is not None:
            return self.fused(self.head.weight, hidden, targets.flatten())
        if self.options is None:
            return F.cross_entropy(self.head(hidden), targets.flatten())
        return F.linear_cross_entropy(hidden, self.head.weight, targets.flatten(), options=self.options)


class _Step:
    """Builds models of one case that share their parameters."""

    def __init__(self, case: str) -> None:
        torch.manual_seed(0)
        self.batch, self.config = CONFIGS[case]
        first = gpt(self.batch, self.config)
        self.model, self.args = first.model, first.args

    def another(self, **settings: Any) -> nn.Module:
        """One more model with the same parameters' memory; with ``settings`` one of :class:`_Chunked`."""
        with torch.device("meta"):
            model = gpt(1, self.config).model
        own = dict(self.model.named_parameters())
        for name, module in model.named_modules():
            for key, held in list(module._parameters.items()):
                if held is not None:  # the head has no name of its own: it is tied
                    value = own.get(f"{name}.{key}", own["tokens.weight"])
                    module._parameters[key] = nn.Parameter(value.detach())
        assert isinstance(model, GPT)
        model.head.weight = model.tokens.weight
        if settings:
            model.__class__ = _Chunked
            for key, value in settings.items():
                setattr(model, key, value)
        return model


def _bits(model: nn.Module, run: Callable[..., Any], args: Any, expected: list[torch.Tensor] | None) -> Any:
    """Loss and gradients of a step; or how far they are from ``expected``."""
    clear(model)
    loss = run(*args)
    loss.backward()
    found = [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]
    clear(model)
    if expected is None:
        return found
    if all(map(torch.equal, found, expected)):
        return 0.0
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def rows(case: str, quick: bool) -> Iterator[Row]:
    """One row per method."""
    torch.set_num_threads(1)
    made = _Step(case)
    args = made.args
    methods: dict[str, tuple[nn.Module, Callable[..., Any]]] = {"eager": (made.model, made.model)}
    reasons: dict[str, str] = {}
    eager_peak = above_bytes(made.model, made.model, args)
    expected = _bits(made.model, made.model, args, None)
    for label, build in _peers(made).items():
        try:
            methods[label] = build()
            step(methods[label][1], args)
        except Exception as error:  # whatever keeps a peer from running here is its row
            methods.pop(label, None)
            reasons[label] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        for model, _ in methods.values():
            clear(model)
    plans: dict[str, ebbtide.Plan] = {}
    for share in SHARES:
        label = f"ebbtide {share:.0%}"
        model = made.another()
        budget = resident_bytes([model, args]) + int(share * eager_peak)
        try:
            rewrites = REWRITES.get(share)
            if share == min(SHARES):  # within so little there is no room to find out what it rests on
                ebbtide.plan(model, args, budget=budget, options=ebbtide.Options(rewrites=rewrites, progress=None))
            ebbtide.fit(model, budget, progress=None, options=ebbtide.Options(rewrites=rewrites))
            for _ in range(2):  # the first step is proven, the second measured
                step(model, args)
                clear(model)
        except BudgetError as error:
            reasons[label] = str(error)[:160]
            continue
        plan = ebbtide.plan_of(model)
        assert plan is not None
        plans[label], methods[label] = plan, (model, model)
    differences = {key: _bits(model, run, args, expected) for key, (model, run) in methods.items()}
    del expected
    peaks = {key: above_bytes(model, run, args) for key, (model, run) in methods.items()}
    times = interleaved(methods, args, 2 if quick else ROUNDS)
    for label in methods:
        yield _row(case, label, peaks, times, differences[label], plans.get(label), quick)
    for label, reason in reasons.items():
        checks = () if not label.startswith("ebbtide") or quick else (holds("a plan was found", False),)
        yield Row("gpt2", {"case": case, "method": label, "not_run": reason}, checks)


def _row(
    case: str,
    label: str,
    peaks: dict[str, int],
    times: dict[str, Times],
    difference: float,
    plan: ebbtide.Plan | None,
    quick: bool,
) -> Row:
    of_eager = peaks[label] / peaks["eager"]
    ratio = times[label].best_ratio(times["eager"])
    checks: list[Check] = []
    if plan is not None:
        checks.append(holds("eager's bits", difference == 0.0))
        for share, most in TARGETS.items():
            if label == f"ebbtide {share:.0%}" and not quick:
                checks += [at_most("peak of eager's", of_eager, share), at_most("CPU time of eager's", ratio, most)]
    rewrites = "" if plan is None or plan.rewritten is None else "; ".join(map(str, plan.rewritten.rewrites))
    columns = {
        "case": case,
        "method": label,
        "bits": "eager's" if difference == 0.0 else f"off by {difference:.1e}",
        "peak_bytes": peaks[label],
        "of_eager": of_eager,
        "cpu_seconds_best": times[label].best,
        "cpu_ratio_best": ratio,
        "cpu_ratio_median": times[label].median_ratio(times["eager"]),
        "predicted_overhead": None if plan is None else plan.overhead,
        "bound": None if plan is None else plan.bound,
        "plan_seconds": None if plan is None else plan.plan_seconds,
        "rewrites": rewrites,
    }
    return Row("gpt2", columns, tuple(checks))


# -- everybody else -----------------------------------------------------------------------------------------------


def _peers(made: _Step) -> dict[str, Callable[[], tuple[nn.Module, Callable[..., Any]]]]:
    def plain(**settings: Any) -> tuple[nn.Module, Callable[..., Any]]:
        model = made.another(**settings)
        return model, model

    options = torch.nn.LinearCrossEntropyOptions
    found = {"checkpoint per block": lambda: plain(every_block=True)}
    for share in MEMORY_BUDGETS:
        found[f"activation_memory_budget {share:g}"] = lambda share=share: _memory_budget(made, share)
    found |= {
        "F.linear_cross_entropy, options by itself": lambda: plain(options=options()),
        "F.linear_cross_entropy, compact, 256 rows": lambda: plain(
            options=options(acc_policy="compact", batch_chunk_size=256)
        ),
        "F.linear_cross_entropy and checkpoint per block": lambda: plain(options=options(), every_block=True),
        "Inductor": lambda: _inductor(made, chunks=None),
        "Inductor, auto_chunker": lambda: _inductor(made, chunks=8),
        "Liger's fused loss": lambda: _liger(made),
    }
    return found


def _memory_budget(made: _Step, share: float) -> tuple[nn.Module, Callable[..., Any]]:
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    model = made.another()
    backend = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    with (
        dynamo_config.patch(recompile_limit=64),
        config.patch(activation_memory_budget=share, enable_autograd_cache=False),
    ):
        step(compiled, made.args)
    return model, compiled


def _inductor(made: _Step, chunks: int | None) -> tuple[nn.Module, Callable[..., Any]]:
    from torch._dynamo import config as dynamo_config
    from torch._inductor import config

    model = made.another()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    chunking = {"auto_chunker.enable": chunks is not None, "auto_chunker.num_chunk": chunks}
    with dynamo_config.patch(recompile_limit=64), config.patch(fx_graph_cache=False, **chunking):
        step(compiled, made.args)
    return model, compiled


def _liger(made: _Step) -> tuple[nn.Module, Callable[..., Any]]:
    if importlib.util.find_spec("liger_kernel") is None:
        raise ImportError("liger-kernel is not installed; it needs triton, whose kernels do not run on a CPU")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

    model = made.another(fused=LigerFusedLinearCrossEntropyLoss())
    return model, model

"""What PyTorch's own ways get wrong on this build, beside Ebbtide on the same model, budget knob and seed.

1. ``activation_memory_budget`` draws dropout's mask anew where it recomputes it (pytorch#190758): wrong gradients.
2. It saves a batch norm's running statistics, which the step then changes: a RuntimeError.
3. ``torch.compile`` of ``nn.LSTM`` (``allow_rnn``) leaves out the dropout between its layers, or fails in its capture.
4. A forward that returns ``(loss, logits)`` is charged a gradient of zeros for the logits: a higher peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch.nn import functional as F

import ebbtide
from ebbtide.zoo import GPTConfig, gpt
from ebbtide_published.zoo.small import SMALL
from harness.grid import captured
from harness.min_cut import budget_of, min_cut_compiled
from harness.record import Row, at_most, holds

TITLE = "PyTorch's known failures"
CASES = ("dropout", "batch norm", "nn.LSTM dropout", "loss and logits")
QUICK = ("dropout", "nn.LSTM dropout")
SHARES = (0.9, 0.5, 0.2)
PEAK_TARGET = 1.01
LSTM_TARGET = 1e-4  # float32, another order of summation than oneDNN's

Step = Callable[..., Any]


def rows(name: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    yield from {"dropout": _dropout, "batch norm": _batch_norm, "nn.LSTM dropout": _lstm, "loss and logits": _pair}[
        name
    ]()


def _peer(model: nn.Module, share: float = 1.0) -> Step:
    """``torch.compile`` with PyTorch's min-cut partitioner under ``activation_memory_budget``."""
    compiled = min_cut_compiled(model)

    def run(*args: Any, **kwargs: Any) -> Any:
        with budget_of(share):
            return compiled(*args, **kwargs)

    return run


def _gradients(model: nn.Module, run: Step, args: tuple[Any, ...]) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    run(*args).backward()
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def _error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error of a parameter's gradient, by norms."""
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(found, expected, strict=True))


def _dropout() -> Iterator[Row]:
    config = GPTConfig(vocabulary=512, length=64, layers=3, width=64, heads=4, dropout=0.1)
    case = gpt(4, config)
    expected = _gradients(case.model, case.model, case.args)
    for share in SHARES:
        error = _error(_gradients(case.model, _peer(case.model, share), case.args), expected)
        yield Row("known", {"case": "dropout", "method": f"activation_memory_budget {share:g}", "error": error})
    known = captured(case)
    for share in SHARES[1:]:
        plan = known.plan(known.grid_bytes(share))
        ebbtide.fit(case.model, plan, options=ebbtide.Options(verify=False))
        error = _error(_gradients(case.model, case.model, case.args), expected)
        ebbtide.unfit(case.model)
        replayed = sum(int(n) - 1 for op, n in zip(plan.program.ops, plan.timeline.runs, strict=True) if op.random)
        columns = {"case": "dropout", "method": f"ebbtide {share:.0%}", "error": error, "random_reruns": replayed}
        yield Row("known", columns, (at_most("gradient error", error, 0.0),))


def _batch_norm() -> Iterator[Row]:
    case = SMALL["resnet50"]()
    try:
        _gradients(case.model, _peer(case.model, 0.5), case.args)
        outcome = "ran"
    except RuntimeError as error:
        outcome = f"RuntimeError: {str(error).splitlines()[0][:80]}"
    yield Row("known", {"case": "batch norm", "method": "activation_memory_budget 0.5", "outcome": outcome})
    case = SMALL["resnet50"]()
    known = captured(case)
    plan = known.plan(known.grid_bytes(0.2), effort=1000)
    seen = ebbtide.verify(case.model, case.args, case.kwargs, plan)
    again = sum(int(n) - 1 for op, n in zip(plan.program.ops, plan.timeline.runs, strict=True) if op.once)
    columns = {"case": "batch norm", "method": "ebbtide 20%", "outcome": "ran", "batch_norm_reruns": again}
    yield Row("known", columns, (holds("bit-equal", seen.equal), holds("as eager", not seen.eager_differences)))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 32, num_layers=3, dropout=0.5)
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0]).square().mean()


def _lstm() -> Iterator[Row]:
    model, args = _Recurrent(), (torch.randn(12, 16, 32),)
    expected = _gradients(model, model, args)
    columns = {"case": "nn.LSTM dropout", "method": "torch.compile allow_rnn"}
    try:
        with dynamo_config.patch(allow_rnn=True):
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
            columns["error"] = _error(_gradients(model, compiled, args), expected)
    except Exception as error:  # what the peer does on this build is the result
        columns["outcome"] = f"{type(error).__name__}: {error}"[:90]
    yield Row("known", columns)
    known = captured(ebbtide.Case(model, args))
    ebbtide.fit(model, known.plan(known.grid_bytes(0.2)), options=ebbtide.Options(verify=False))
    error = _error(_gradients(model, model, args), expected)
    columns = {"case": "nn.LSTM dropout", "method": "ebbtide 20%", "error": error}
    yield Row("known", columns, (at_most("gradient error", error, LSTM_TARGET),))


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 2048))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.layers(x)
        return F.cross_entropy(logits, target), logits


def _pair() -> Iterator[Row]:
    args = (torch.randn(1024, 128), torch.randint(2048, (1024,)))
    peaks: dict[str, int] = {}
    for label in ("eager", "torch.compile", "ebbtide keep-all"):
        model = _Pair()
        run: Step = model
        if label == "torch.compile":
            run = _peer(model)
        elif label == "ebbtide keep-all":
            ebbtide.fit(model, "1000%", options=ebbtide.Options(planner="keep_all", verify=False))
        run(*args)[0].backward()
        model.zero_grad()
        with ebbtide.measure(model) as gauge:
            outputs = run(*args)
            outputs[0].backward()
        peaks[label] = gauge.above_bytes
        columns = {
            "case": "loss and logits",
            "method": label,
            "peak_bytes": gauge.above_bytes,
            "of_eager": gauge.above_bytes / peaks["eager"],
        }
        ours = label.startswith("ebbtide")
        yield Row("known", columns, (at_most("of eager's peak", columns["of_eager"], PEAK_TARGET),) if ours else ())

"""The sweep of torch's list of ops tells equal bits, other bits and refusals apart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def opinfo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import questions.opinfo as module

    return module


def sample(*args: Any, **kwargs: Any) -> SimpleNamespace:
    first = torch.randn(3, 4, requires_grad=True)
    return SimpleNamespace(input=first, args=args, kwargs=kwargs, output_process_fn_grad=lambda result: result)


def listed(function: Any, *samples: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(op=function, sample_inputs=lambda *_, **__: list(samples))


def otherwise_when_captured(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return x * 3
    torch._dynamo.graph_break()  # so that this branch is no graph, and the other one is captured
    return x * 2


@pytest.mark.parametrize(
    ("function", "outcome"),
    [
        (torch.sin, "equal"),
        (otherwise_when_captured, "differs"),
        (lambda x: x[x > 0], "refused"),
        (lambda x: x.no_such_method(), "fails in eager"),
        (lambda x: (x > 0).float(), "no gradient"),
    ],
    ids=["equal", "differs", "refused", "fails", "none"],
)
def test_an_op_has_an_outcome(opinfo: Any, function: Any, outcome: str) -> None:
    row = opinfo._row("some op", listed(function, sample()))
    assert row.columns["outcome"] == outcome
    assert row.passed == (outcome != "differs"), "what differs has to be named"


def test_outcomes_are_counted(opinfo: Any) -> None:
    rows = [opinfo._row(name, listed(torch.sin, sample(), sample())) for name in ("one", "two")]
    assert {key: value for key, value in opinfo.summary(rows).columns.items() if value} == {
        "case": "all",
        "ops": 2,
        "samples": 4,
        "equal": 2,
    }

"""The public suite: what it lists, and that right, wrong and refused are told apart."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from harness.record import Row
from suite import diffusion, hugging_face, judge, timm_models, torchvision_models
from suite.clock import CPUClock, OutOfTime
from suite.judge import AS_CAPTURED, AS_EAGER, OTHER, WRONG, judged
from suite.subject import NotSupported, Subject, WithLoss, checkpoint_blocks
from suite.summary import summary_of


class _Blocks(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), norm(32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Branches(_Blocks):
    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs * 2 if outputs.sum() > 0 else outputs


def _subject(model: nn.Module) -> Subject:
    return Subject(WithLoss(model).train(), {"x": torch.randn(256, 32), "target": torch.randn(256, 32)})


def test_the_lists_are_long_enough_and_of_classes_that_there_are() -> None:
    import transformers

    known = set(dir(transformers))
    assert len(hugging_face.CASES) >= 55
    assert set(hugging_face.CASES) <= known
    assert {config for config, _, _ in hugging_face.MODELS.values()} <= known
    assert len(timm_models.CASES) >= 30
    assert len(torchvision_models.CASES) >= 12
    assert len(diffusion.CASES) >= 5


@pytest.mark.parametrize("name", ["BertForMaskedLM", "MixtralForCausalLM", "WhisperForConditionalGeneration"])
def test_a_class_gives_a_loss(name: str) -> None:
    subject = hugging_face.build(name)
    assert subject.model.training
    assert subject.model(**subject.kwargs).loss.requires_grad


def test_a_captured_model_has_a_row_per_method() -> None:
    rows = {row.columns["method"]: row for row in judged("q", "blocks", lambda: _subject(_Blocks()), quick=True)}
    assert list(rows) == ["eager", "ebbtide 50%", "checkpoint per block"]
    assert all(row.passed for row in rows.values())
    ours, theirs = rows["ebbtide 50%"].columns, rows["checkpoint per block"].columns
    assert ours["bits"] == theirs["bits"] == AS_EAGER
    assert ours["smallest_bytes"] < ours["peak_bytes"] <= ours["budget_bytes"] < ours["unplanned_bytes"]
    assert ours["peak_bytes"] == ours["predicted_bytes"]
    assert theirs["peak_bytes"] < rows["eager"].columns["peak_bytes"]
    assert ours["compression_ratio"] > 1


def test_a_checkpoint_that_counts_a_batch_twice_has_other_bits() -> None:
    rows = judged("q", "blocks", lambda: _subject(_Blocks(nn.BatchNorm1d)), quick=True)
    columns = {row.columns["method"]: row.columns for row in rows}
    assert columns["ebbtide 50%"]["bits"] == AS_EAGER
    assert columns["checkpoint per block"]["bits"] == OTHER
    assert "running" in columns["checkpoint per block"]["first_difference"]


def test_what_cannot_be_captured_is_refused_with_its_line() -> None:
    (row,) = judged("q", "branches", lambda: _subject(_Branches()), quick=True)
    assert row.columns["refused"] == "CaptureError"
    assert row.columns["source"].startswith("test_public_suite.py:")
    assert row.passed


def test_a_fault_is_no_refusal_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("x")

    monkeypatch.setattr(judge, "fitted", fails)
    (row,) = judged("q", "blocks", lambda: _subject(_Blocks()), quick=True)
    assert row.columns["refused"] == "KeyError"
    assert not row.passed


def _row(case: str, method: str = "ebbtide 50%", bits: str = AS_EAGER, peak: int = 90, **more: Any) -> Row:
    numbers = {"of_eager_peak": 0.5, "compression_ratio": 2.0, "over_eager_median": 1.1}
    return Row(
        "q", {"case": case, "method": method, "bits": bits, "peak_bytes": peak, "budget_bytes": 100} | numbers | more
    )


def test_misses_are_counted() -> None:
    rows = [
        _row("a"),
        _row("b", bits=WRONG),
        _row("c", peak=101),
        _row("d", bits=AS_CAPTURED),
        Row("q", {"case": "e", "method": "ebbtide", "refused": "CaptureError", "error": "data"}),
        Row("q", {"case": "a", "method": "checkpoint per block", "error": "left out for time"}),
    ]
    whole, ours, theirs = summary_of("q", ["a", "b", "c", "d", "e", "f"], rows)
    counted = ("models", "not_run", "captured", "refused", "wrong_bits", "not_as_eager", "over_budget")
    assert [whole.columns[name] for name in counted] == [5, 1, 4, 1, 1, 1, 1]
    assert [check.passed for check in whole.checks] == [False, False, False]
    assert (ours.columns["models"], ours.columns["compression_ratio"]) == (4, pytest.approx(2.0))
    assert (theirs.columns["models"], theirs.columns["errors"]) == (0, 1)
    assert next(iter(summary_of("q", ["a"], rows[:1]))).passed
    assert not list(summary_of("q", ["a"], []))


def test_a_peer_ends_when_the_time_does() -> None:
    clock = CPUClock(time.process_time() + 0.2)
    with pytest.raises(OutOfTime):
        _tries_for_ever(clock)
    assert clock.left <= 0.05
    with pytest.raises(OutOfTime), CPUClock(0.0).interrupting(0.0):
        pytest.fail("nothing was left")


def _tries_for_ever(clock: CPUClock) -> None:
    with clock.interrupting(0.0):
        while True:
            try:
                sum(range(1000))
            except Exception:  # as compilers do that try something
                continue


def test_a_model_without_a_list_of_blocks_has_no_checkpoints() -> None:
    with pytest.raises(NotSupported, match="blocks"):
        checkpoint_blocks(nn.Linear(2, 2))


def test_losses_of_auxiliary_heads_add_up() -> None:
    target, output = torch.zeros(2, 2), torch.ones(2, 2)
    heads = SimpleNamespace(sample=(output, output))
    assert WithLoss(nn.Identity())(target, x=output).item() == 1.0
    assert WithLoss(_Gives(heads))(target, x=output).item() == 2.0


class _Gives(nn.Module):
    def __init__(self, given: object) -> None:
        super().__init__()
        self.given = given

    def forward(self, x: Tensor) -> object:
        return self.given

"""The demo at a size for tests: its promises hold, and a broken one is seen."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ebbtide.cli import app
from ebbtide.demo.text import batches
from ebbtide.demo.training import DemoConfig, run_demo
from ebbtide.planners import Interrupt, Progress
from ebbtide.report.plan import Plan
from ebbtide.report.text.demo import DemoRecord, write_demo

SMALL = ["--steps", "5", "--layers", "1", "--width", "64", "--length", "64", "--batch", "8"]


def _unheard(progress: Progress) -> None:
    """Nobody looks at it."""


def _written(record: DemoRecord) -> str:
    stream = StringIO()
    write_demo(record, stream)
    return stream.getvalue()


def test_demo_keeps_its_promises_at_half_of_the_peak(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["demo", "--json", *SMALL, "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout.strip().splitlines()[-1])
    assert data["steps"] == len(data["losses"]) == 5
    assert data["losses_equal"] is True
    assert data["parameters_equal"] is True
    assert data["random_state_equal"] is True
    assert data["measured_peak_bytes"] <= data["budget_bytes"] <= data["baseline_peak_bytes"] / 2
    assert data["measured_peak_bytes"] == pytest.approx(data["predicted_peak_bytes"], rel=1e-3)
    assert data["budget_bytes"] < data["measured_eager_peak_bytes"]
    assert data["recomputed"] > 0
    assert data["verified_buffers"] > 0
    assert data["measured_over_eager"] > -1
    assert Plan.load(out).summary() == {key: data[key] for key in Plan.load(out).summary()}


def test_the_peer_has_the_fewest_checkpoints_within_the_budget() -> None:
    sizes = {"steps": 4, "layers": 3, "width": 64, "length": 64, "batch": 8}
    within, _ = run_demo(DemoConfig(budget="80%", **sizes), _unheard)
    assert 1 <= within.checkpointed_blocks < within.blocks == 3
    assert within.checkpointed.peak_bytes <= within.plan.budget_bytes < within.eager.peak_bytes
    loose, _ = run_demo(DemoConfig(budget="200%", **sizes), _unheard)
    assert loose.checkpointed_blocks == 0
    assert "checkpoints around 0 of 3 blocks" in _written(loose)
    above = replace(within, checkpointed=replace(within.checkpointed, peak_bytes=within.plan.budget_bytes + 1))
    assert "still above the budget" in _written(above)


def test_an_interrupt_ends_with_what_was_shown_until_then() -> None:
    interrupt, told = Interrupt(), []

    def say(progress: Progress) -> None:
        told.append(progress.stage)
        if progress.stage.startswith("step 2 of 9"):
            interrupt.set()

    record, _ = run_demo(DemoConfig(steps=9, layers=1, width=64, length=64, batch=8, budget="80%"), say, interrupt)
    assert record.within_budget
    assert record.steps == len(record.losses) == 4
    assert told[-1] == "step 4 of 9, eager"
    numbers = [int(each.split()[1]) for each in told]
    assert numbers == sorted(numbers)  # a progress that does not go backwards


def test_no_measured_figure_contradicts_a_claim_and_a_broken_promise_is_shown() -> None:
    record, plan = run_demo(DemoConfig(steps=4, layers=1, width=64, length=64, batch=8, budget="80%"), _unheard)
    assert record.within_budget
    near = plan.overhead + 0.03

    def taking(over_eager: float, bound: float | None) -> DemoRecord:
        planned, eager = (replace(each, step_seconds=1.0) for each in (record.planned, record.eager))
        planned = replace(planned, step_seconds=1 + over_eager)
        return replace(record, plan=replace(plan, bound=bound), planned=planned, eager=eager)

    for bound, is_told in ((near + 0.1, True), (near - 0.1, False), (None, False)):
        text = _written(taking(near, bound))
        assert ("bound       none is proven" in text) == (bound is None)
        if bound is not None:
            assert f"bound       {100 * bound:.2f} % of predicted time at the least" in text
            assert plan.bound_class in text
            assert "costs: given" in plan.bound_class
        assert ("measured is over eager's" in text) == is_told
    assert "50.00 %" in _written(taking(0.5, 0.0))
    broken = replace(record, losses_equal=False)
    assert not broken.within_budget
    assert "BROKEN  losses of all 4 steps" in _written(broken)
    assert _written(broken).count("kept  ") == 3


def test_batches_are_real_text_and_always_the_same() -> None:
    first, again = batches(2, 3, 16, seed=0), batches(2, 3, 16, seed=0)
    for (tokens, targets), (tokens_again, _) in zip(first, again, strict=True):
        assert torch.equal(tokens, tokens_again)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert tokens.shape == (3, 16)
        assert bytes(tokens[0].tolist()).isascii()

"""The demo at a size for tests: its promises hold, and a broken one is seen."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ebbtide.cli import app
from ebbtide.demo.text import batches
from ebbtide.demo.training import DemoConfig, run_demo
from ebbtide.report.plan import Plan
from ebbtide.report.text.demo import write_demo

SMALL = ["--steps", "5", "--layers", "1", "--width", "64", "--length", "64", "--batch", "8"]


def test_demo_keeps_its_promises_at_half_of_the_peak(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["demo", "--json", *SMALL, "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout.strip().splitlines()[-1])
    assert data["steps"] == len(data["losses"]) == 5
    assert data["losses_equal"] is True
    assert data["parameters_equal"] is True
    assert data["random_state_equal"] is True
    assert data["measured_peak_bytes"] <= data["budget_bytes"] <= data["measured_unplanned_peak_bytes"] / 2
    assert data["measured_peak_bytes"] == pytest.approx(data["predicted_peak_bytes"], rel=1e-3)
    assert data["measured_unplanned_peak_bytes"] == pytest.approx(data["baseline_peak_bytes"], rel=1e-3)
    assert data["recomputed"] > 0
    assert data["verified_buffers"] > 0
    assert data["measured_overhead"] > -1
    assert Plan.load(out).summary() == {key: data[key] for key in Plan.load(out).summary()}


def test_no_measured_figure_contradicts_a_claim_and_a_broken_promise_is_shown() -> None:
    told: list[str] = []
    record, plan = run_demo(DemoConfig(steps=4, layers=1, width=64, length=64, batch=8, budget="80%"), told.append)
    assert record.within_budget
    assert re.fullmatch(r"step 3 of 4, about .* left", told[-4])
    assert "left" not in told[0]
    near = plan.overhead + 0.03
    for bound, is_told in ((near + 0.1, True), (near - 0.1, False), (None, False)):
        stream = StringIO()
        seconds = {"measured_step_seconds": 1 + near, "unplanned_step_seconds": 1.0}
        write_demo(replace(record, plan=replace(plan, bound=bound), **seconds), stream)
        text = stream.getvalue()
        assert ("bound       none is proven" in text) == (bound is None)
        assert "no plan" not in text
        if bound is not None:
            assert f"bound       {100 * bound:.2f} % of predicted overhead at the least" in text
            assert plan.bound_class in text
            assert "costs: given" in plan.bound_class
        assert ("is of other costs" in text) == is_told
    stream = StringIO()
    slow = replace(record, plan=replace(plan, bound=0.0), measured_step_seconds=1.5, unplanned_step_seconds=1.0)
    write_demo(slow, stream)
    assert "the measured 50.00 % is of other costs" in stream.getvalue()
    broken = replace(record, losses_equal=False)
    assert not broken.within_budget
    stream = StringIO()
    write_demo(broken, stream)
    assert "BROKEN  losses of all 4 steps" in stream.getvalue()
    assert stream.getvalue().count("kept  ") == 3


def test_batches_are_real_text_and_always_the_same() -> None:
    first, again = batches(2, 3, 16, seed=0), batches(2, 3, 16, seed=0)
    for (tokens, targets), (tokens_again, _) in zip(first, again, strict=True):
        assert torch.equal(tokens, tokens_again)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert tokens.shape == (3, 16)
        assert bytes(tokens[0].tolist()).isascii()

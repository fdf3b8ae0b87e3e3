"""The GPU tier's code runs here at toy size on CPU: every model builds, every method runs, steps can be resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
from cards import methods, steps  # noqa: E402
from cards.device import Device, the_device  # noqa: E402
from cards.subjects import CASES, SUBJECTS, build  # noqa: E402
from harness.record import Row  # noqa: E402


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The CPU as the stand-in for a card."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield the_device(toy=True)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.parametrize("case", CASES)
def test_a_model_steps_alike_with_and_without_checkpoints(device: Device, case: str) -> None:
    """Checkpoints replay dropout and leave no bit changed; nothing here is captured."""

    def made() -> Any:
        return build(case, device.kind, device.total_bytes, toy=True)

    eager = methods.eager(made()).results()
    again = methods.checkpointed(made(), SUBJECTS[case.rpartition("-")[0]].blocks).results()
    assert len(eager) > 1
    assert eager.keys() == again.keys()
    assert all(torch.equal(eager[name], again[name]) for name in eager)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param("gpt-bfloat16", marks=pytest.mark.long), "unet-float32"])
def test_a_step_of_the_tier_gives_its_rows_and_meets_its_targets(device: Device, case: str) -> None:
    rows = list(steps.rows_on(device, case, toy=True))
    labels = [row.columns["method"] for row in rows]
    ours = [row for row in rows if str(row.columns["method"]).startswith("ebbtide")]
    assert labels[:3] == ["predicted, keep all", "eager", "checkpoint per block"]
    assert labels[-1] == "eager, once more"
    assert {"ebbtide, keep all", "ebbtide, smallest"} <= set(labels)
    assert all(row.passed for row in rows), [str(c) for row in rows for c in row.checks if not c.passed]
    assert all(row.checks for row in ours if "error" not in row.columns)
    by_label = {row.columns["method"]: row.columns for row in rows}
    assert by_label["ebbtide, smallest"]["peak_bytes"] < by_label["eager"]["peak_bytes"]


@pytest.mark.slow
def test_a_part_of_the_rows_has_what_they_are_compared_at(device: Device) -> None:
    rows = list(steps.rows_on(device, "unet-float32", toy=True, words=["at the peak of checkpoint"]))
    assert [row.columns["method"] for row in rows] == [
        "predicted, keep all",
        "eager",
        "checkpoint per block",
        "ebbtide, at the peak of checkpoint per block",
        "eager, once more",
    ]


FACTS = {"python": "3.12.1", "torch": "2.13.0", "card": "a card", "code": "0123"}


def a_run(done: list[str], fails: Sequence[str] = ()) -> gpu.Run:
    def run(case: Sequence[str], on_row: Callable[[Row], None], seconds: float) -> str | None:
        done.extend(case)
        on_row(Row("card", {"case": case[0], "method": "eager"}))
        return "exit 1: it broke" if case[0] in fails else None

    return run


def test_a_finished_step_is_skipped_and_a_failed_one_is_not(tmp_path: Path) -> None:
    first: list[str] = []
    gpu.run_steps(["a", "b"], FACTS, tmp_path, redo=False, seconds=60, run=a_run(first, fails=["b"]))
    again: list[str] = []
    records = gpu.run_steps(["a", "b", "c"], FACTS, tmp_path, redo=False, seconds=60, run=a_run(again))
    assert (first, again) == (["a", "b"], ["b", "c"])
    assert [list(record.case_seconds) for record in records] == [["a"], ["b"], ["c"]]
    redone: list[str] = []
    gpu.run_steps(["a"], FACTS, tmp_path, redo=True, seconds=60, run=a_run(redone))
    assert redone == ["a"]


@pytest.mark.parametrize("changed", ["python", "torch", "card", "code"])
def test_another_version_is_measured_anew(tmp_path: Path, changed: str) -> None:
    gpu.run_steps(["a"], FACTS, tmp_path, redo=False, seconds=60, run=a_run([]))
    done: list[str] = []
    gpu.run_steps(["a"], {**FACTS, changed: "other"}, tmp_path, redo=False, seconds=60, run=a_run(done))
    assert done == ["a"]


def test_a_file_that_was_cut_off_is_measured_anew(tmp_path: Path) -> None:
    gpu.run_steps(["a"], FACTS, tmp_path, redo=False, seconds=60, run=a_run([]))
    path = tmp_path / "a.json"
    path.write_text(path.read_text()[:40])
    assert gpu.finished(path, FACTS) is None


def test_no_step_begins_after_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    assert gpu.run_steps(["a", "b"], FACTS, tmp_path, redo=False, seconds=0.0, run=a_run(done)) == []
    assert done == []
    assert "run again for: a, b" in capsys.readouterr().out


def test_code_is_told_apart_by_any_file(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a = 1\n")
    before = gpu.code([tmp_path])
    (tmp_path / "one.py").write_text("a = 2\n")
    assert gpu.code([tmp_path]) != before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_one_line_says_so() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [gpu.NO_CARD]

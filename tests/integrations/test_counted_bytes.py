"""Budgets of trainers as a counter of the allocator's calls has them: situations of ``benchmarks/promises.py``.

All of them run once, each in a fork of one process that has imported the trainers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SITUATIONS = {
    "lightning_callback_accumulated": "lightning",
    "lightning_metrics": "lightning",
    "lightning_manual": "lightning",
    "lightning_holds_from_the_first_step": "lightning",
    "accelerate_loop_bf16_fit_first": "accelerate",
    "accelerate_loop_plain_prepare_first": "accelerate",
    "peft_trainer_lora": "peft",
    "peft_before_dora": "peft",
    "sft_accumulated": "trl",
    "dpo_lora_plain": "trl",
}
THERE = [name for name, library in SITUATIONS.items() if importlib.util.find_spec(library) is not None]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("counted") / "promises.json"
    script = str(ROOT / "benchmarks" / "promises.py")
    command = [sys.executable, script, "--only", *THERE, "--effort", "200", "--out", str(out)]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = json.loads(out.read_text())
    missed = any(not check["passed"] for row in found["rows"] for check in row["checks"])
    assert found["failures"] == []
    assert done.returncode == missed, done.stderr
    return {row["columns"]["case"]: row for row in found["rows"] if row["question"] != "counts"}


@pytest.mark.slow
@pytest.mark.parametrize("name", THERE)
def test_the_peak_is_within_the_budget_as_the_allocator_has_it(name: str, record: dict[str, Any]) -> None:
    row = record[name]
    assert [check for check in row["checks"] if not check["passed"]] == [], row["columns"].get("why")
    assert "counter" in record
    assert set(record) == {*THERE, "counter"}

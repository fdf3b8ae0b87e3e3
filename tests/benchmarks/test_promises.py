"""The harness of ``benchmarks/promises.py``: an exact oracle, right told from wrong, and six situations that hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from harness.record import Row, at_most, holds  # noqa: E402
from situations.oracle import build_counter  # noqa: E402
from situations.run import _copy, differences  # noqa: E402
from situations.runner import KINDS, counted  # noqa: E402

SMOKE = (
    "outputs_kept_dict",
    "optimizer_adamw",
    "hundred_percent_larger_chain",
    "autocast_chain",
    "budget_too_small",
    "gradients_and_none_in_turns",
)
"""Situations that hold, for every kind of check one; the whole is half an hour of ``benchmarks/promises.py``."""


def _run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


def test_the_counter_is_exact_to_the_byte(tmp_path: Path) -> None:
    library, reason = build_counter(tmp_path)
    if library is None:
        pytest.skip(reason)
    code = "from situations.oracle import measured_resolution; print(measured_resolution())"
    done = _run(["-c", code], LD_PRELOAD=str(library))
    assert done.stdout.strip() == "0", done.stderr


def test_without_a_compiler_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_counter(tmp_path) == (None, "no C compiler (cc, gcc, clang)")


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (torch.ones(2, 3), ""),
        (torch.ones(2, 3).nextafter(torch.tensor(2.0)), "other bits, by up to 1.2e-07"),
        (torch.ones(3, 2).t(), "strides (1, 2) for (3, 1)"),
        (torch.ones(2, 3).double(), "torch.float64(2, 3) for torch.float32(2, 3)"),
        (None, "None for a tensor"),
    ],
)
def test_differences_are_told(ours: Any, said: str) -> None:
    found = differences({"x": _copy(ours)}, {"x": _copy(torch.ones(2, 3))})
    assert found == ([f"x: {said}"] if said else [])


def test_nan_is_equal_to_the_same_nan_alone() -> None:
    one, other = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert differences({"x": _copy(one)}, {"x": _copy(one)}) == []
    assert differences({"x": _copy(one)}, {"x": _copy(other)}) != []
    assert isinstance(_copy(one)[3], np.ndarray)


def test_misses_are_counted_by_kind() -> None:
    rows = [
        Row("copies", {"case": "a"}, (holds("planned", True), at_most("bytes over budget", 9000, 8192))),
        Row("copies", {"case": "b"}, (holds("planned", False),)),
        Row("hooks", {"case": "c"}, (holds("planned", True), holds("no call unplanned", False))),
    ]
    *_, total = counted(rows)
    assert [total.columns[name] for name in ("situations", "right", *KINDS)] == [3, 0, 1, 0, 1, 0, 1]


@pytest.mark.long
@pytest.mark.slow
def test_six_situations_hold(tmp_path: Path) -> None:
    """Every one in a process of its own."""
    out = tmp_path / "promises.json"
    done = _run([str(ROOT / "benchmarks" / "promises.py"), "--only", *SMOKE, "--out", str(out)])
    record = json.loads(out.read_text())
    rows = {row["columns"]["case"]: row for row in record["rows"] if row["question"] not in ("counts", "oracle")}
    missed = {
        name: row["columns"].get("why") for name, row in rows.items() if not all(c["passed"] for c in row["checks"])
    }
    assert (set(rows), missed, record["failures"]) == (set(SMOKE), {}, [])
    assert done.returncode == 0, done.stderr

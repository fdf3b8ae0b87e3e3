"""How situations are judged: an exact oracle, and right told from wrong."""

from __future__ import annotations

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
from situations.runner import KINDS, PATHS, counted  # noqa: E402


def test_the_counter_is_exact_to_the_byte(tmp_path: Path) -> None:
    library, reason = build_counter(tmp_path)
    if library is None:
        pytest.skip(reason)
    code = "from situations.oracle import measured_resolution; print(measured_resolution())"
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
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

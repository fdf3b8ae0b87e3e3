"""Triton kernels in planned models, as far as a machine without a card runs them: by Triton's interpreter.

Liger's kernels are refused by name, on a card that is not at hand as well: nobody has registered them as ops.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
THERE = {name: importlib.util.find_spec(name) is not None for name in ("triton", "liger_kernel", "transformers")}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not THERE["triton"], reason="Triton is not installed"),
]
needs_liger = pytest.mark.skipif(
    not (THERE["liger_kernel"] and THERE["transformers"]), reason="Liger's kernels are not installed"
)


def told(*arguments: str, interpreted: bool) -> list[str]:
    """What ``triton_steps.py`` prints, which needs a process: Triton looks once for whether it interprets."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    command = [sys.executable, str(HERE / "triton_steps.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", ["custom_op", "triton_op"])
def test_what_is_an_op_is_planned_with_eagers_bits(kind: str) -> None:
    assert told(kind, interpreted=True) == ["equal: True, planned: 3, runs: [1, 1, 1, 1]"]


def test_an_interpreted_kernel_that_leaves_tensors_behind_is_refused() -> None:
    (said,) = told("leaves", interpreted=True)
    assert "are in use when its result is not any more" in said


@pytest.mark.parametrize("interpreted", [True, False])
def test_a_launch_in_an_autograd_function_is_refused_by_name(interpreted: bool) -> None:
    (said,) = told("function", interpreted=interpreted)
    assert said.startswith("CaptureError")
    assert "Register what launches it as an op" in said


def test_an_op_is_planned_for_a_card_that_is_not_at_hand() -> None:
    assert told("triton_op", "rtx4090-24gb", interpreted=False) == ["planned, runs: [1, 1, 1, 1]"]


@needs_liger
@pytest.mark.parametrize("kind", ["liger_norm", "liger_head", "liger_llama"])
def test_ligers_kernels_are_refused_by_name_for_a_card(kind: str) -> None:
    (said,) = told(kind, "rtx4090-24gb", interpreted=False)
    assert said.startswith("CaptureError")
    assert "such as Liger's, are to be left off" in said

"""Training loops as people write them hold what is promised: bytes as the allocator has them, bits, planned calls.

Some of every group run with every change, in forks of one process and with short searches, as bytes and bits hold for
any plan. All run with the long tests, as ``benchmarks/promises.py`` runs them: with a user's searches.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from situations.registry import GROUPS  # noqa: E402
from situations.runner import PATHS, Server  # noqa: E402

EFFORT = 200
SAMPLE = {
    "copies": ("weights_used_twice", "accumulated_einsum", "behind_a_chain_sum"),
    "outputs": ("losses_collected", "outputs_kept_dict"),
    "optimizers": ("optimizer_adamw", "optimizer_state_loaded", "offloaded_adamw"),
    "resident": ("batch_counts_dict", "teacher_list", "gradients_there_at_the_start"),
    "several": ("embeddings_siamese", "momentum_teacher"),
    "retained": ("hundred_percent_larger_chain", "retained_later_tight", "loss_outside_cross_entropy"),
    "hooks": ("hook_outside_late_parameter", "global_hook_late", "hook_copies_more_than_there_is"),
    "autocast": ("autocast_chain", "autocast_sdpa", "backward_alone_inside_autocast"),
    "kernels": ("interpolate_bilinear", "operation_group_norm"),
    "rewritten": ("numpy_view_rewritten", "fitted_experts"),
    "forwards": ("functional_call", "double_backward", "forward_of_the_instance_wrapping"),
    "compiled": ("compiled_part", "trained_in_a_thread"),
    "roles": ("value_head_squeezed", "keys_mixed", "frozen_then_trained"),
    "draws": ("layerdrop", "stochastic_depth_by_mask", "draw_torch_item"),
    "algebra": ("algebra_svd", "sparse_embedding", "criterion_ctc"),
    "checkpoints": ("preferences_concatenated", "sequential_checkpoints_reentrant"),
    "refused": ("budget_too_small", "branch_on_data", "attention_blocks"),
    "smallest": ("smallest_named_plain", "smallest_named_two_forwards", "smallest_named_retained"),
    "recaptured": ("last_batch_is_smaller", "frozen_in_turns", "gradients_and_none_in_turns"),
    "exceptions": ("exception_in_the_loss", "profiled_from_the_start", "interrupted"),
    "leftovers": ("cache_spoiled_text", "model_dies_in_flight", "forward_whose_loss_fails"),
    "reports": (
        "gradient_of_features_hook",
        "layout_of_a_gradient_flattened",
        "read_in_and_outside_l1",
        "buffer_with_a_graph_running",
    ),
    "large": ("high_water_convolutions",),
    "hugging": ("model_gpt2", "model_wav2vec2"),
    "trainers": ("trainer_plain",),
    "lightning": (
        "lightning_callback_accumulated",
        "lightning_metrics",
        "lightning_manual",
        "lightning_holds_from_the_first_step",
    ),
    "accelerated": ("accelerate_loop_bf16_fit_first", "accelerate_loop_plain_prepare_first"),
    "adapted": ("peft_trainer_lora", "peft_before_dora"),
    "preferred": ("sft_accumulated", "dpo_lora_plain"),
    "distributed": ("ddp_plain",),
}
"""Of every kind of check some, and the quicker ones."""
NEEDS = {
    "hugging": ("transformers",),
    "trainers": ("transformers", "lightning"),
    "lightning": ("lightning", "torchmetrics"),
    "accelerated": ("accelerate",),
    "adapted": ("peft", "transformers"),
    "preferred": ("trl", "peft", "datasets"),
    "forwards": ("accelerate",),
    "recaptured": ("transformers",),
}


def _missing(group: str) -> list[str]:
    return [name for name in NEEDS.get(group, ()) if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(EFFORT, tmp_path_factory.mktemp("counter"))
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in SAMPLE.items() for name in names])
def test_a_situation_holds(group: str, name: str, server: Server) -> None:
    if missing := _missing(group):
        pytest.skip(f"not installed: {', '.join(missing)}")
    row = server.row(group, name)
    assert row.columns["case"] == name
    assert row.checks
    assert [check for check in row.checks if not check.passed] == [], row.columns.get("why")
    if not server.reason and row.columns["outcome"] == "planned":
        assert any(check.what == "bytes over budget" for check in row.checks)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", GROUPS)
def test_every_situation_of_a_group_holds(group: str, tmp_path: Path) -> None:
    if missing := _missing(group):
        pytest.skip(f"not installed: {', '.join(missing)}")
    out = tmp_path / "promises.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "promises.py"), "--only", group, "--out", str(out)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": PATHS}, capture_output=True, text=True, check=False)
    record = json.loads(out.read_text(encoding="utf-8"))
    rows = {row["columns"]["case"]: row for row in record["rows"] if row["question"] == group}
    missed = {
        name: row["columns"].get("why") for name, row in rows.items() if not all(c["passed"] for c in row["checks"])
    }
    assert rows
    assert (missed, record["failures"]) == ({}, [])
    assert done.returncode == 0, done.stderr


def test_every_group_has_a_sample() -> None:
    assert SAMPLE.keys() == GROUPS.keys()

"""``Trainer`` in two processes over gloo: the callback fits the module inside of the wrapper, in each of them."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ebbflow
from trained_alike import NO_GRADIENTS, drawn, tiny_gpt2

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

STEPS = 3
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "ddp_find_unused_parameters": False},
    "bf16 and evaluation": {"bf16": True, "eval_strategy": "steps", "eval_steps": 1},
}


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = drawn(index, 24)
        return {"input_ids": row, "labels": row}


def trained(folder: str, planned: str, **settings: Any) -> dict[str, Any]:
    """What a training leaves in this process; ``planned`` by the callback, by ``fit`` before it, or not at all."""
    import transformers as hf

    from ebbflow.integrations.hf import MemoryBudget

    given: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "no", "per_device_train_batch_size": 2} | settings
    arguments = hf.TrainingArguments(
        output_dir=folder, report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, ddp_backend="gloo", **given
    )
    model = tiny_gpt2()
    budget = MemoryBudget("90%", progress=None, effort=50)
    if planned == "before":
        ebbflow.fit(model, "90%", progress=None, effort=50)
    callbacks: Any = [budget] if planned == "callback" else []
    trainer = hf.Trainer(
        model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=callbacks
    )
    trainer.train()
    wrapped = type(trainer.model_wrapped).__name__
    calls = budget.calls if planned == "callback" else ebbflow.calls_of(model) if planned == "before" else None
    plan = budget.plan if planned == "callback" else None
    return {
        "bits": [each.tolist() for each in model.state_dict().values()],
        "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        "drawn": torch.get_rng_state().tolist(),
        "wrapped": wrapped,
        "planned": None if calls is None else calls.planned,
        "unplanned": None if calls is None else [*calls.unplanned],
        "resident": 0 if plan is None else plan.resident_bytes,
        "weights": sum(each.nbytes for each in model.parameters()),
        "within": plan is None or plan.predicted_peak_bytes <= plan.budget_bytes,
    }


def in_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # asked for, and not used: the group is there
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    found = {
        way: {how: trained(folder, how, **settings) for how in ("eager", "callback")} for way, settings in WAYS.items()
    }
    found["plain"]["before"] = trained(folder, "before")
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pair")
    context: Any = torch.multiprocessing.spawn(in_process, (str(folder),), nprocs=2, join=False)
    while not context.join():
        pass
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_without(way: str, pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        eager, planned = rank[way]["eager"], rank[way]["callback"]
        assert eager["wrapped"] == planned["wrapped"] == "DistributedDataParallel"
        assert {key: planned[key] for key in ("bits", "losses", "drawn")} == {
            key: eager[key] for key in ("bits", "losses", "drawn")
        }
        assert planned["planned"] == STEPS * WAYS[way].get("gradient_accumulation_steps", 1)
        assert set(planned["unplanned"]) <= {NO_GRADIENTS}
        assert planned["within"]
        # Weights, two moments of each and the buckets.
        assert planned["resident"] >= 4 * planned["weights"]


def test_a_model_that_was_fitted_before_needs_no_option(pair: list[dict[str, Any]]) -> None:
    """The wrapper leads all outputs through a node of its own, from which no gradient comes for the logits."""
    for rank in pair:
        eager, before = rank["plain"]["eager"], rank["plain"]["before"]
        assert before["bits"] == eager["bits"]
        assert (before["planned"], before["unplanned"]) == (STEPS, [])

"""Hugging Face's ``Trainer`` with a memory budget: the same training, every step planned."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ebbtide
from ebbtide.errors import UsageError
from sampled import sampled

pytest.importorskip("accelerate")
hf = pytest.importorskip("transformers")

from ebbtide.integrations.hf import MemoryBudget  # noqa: E402 - needs transformers


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of ``lengths`` in turns."""

    def __init__(self, count: int = 16, lengths: tuple[int, ...] = (24,)) -> None:
        self.rows = [torch.randint(96, (lengths[i // 4 % len(lengths)],), generator=_drawn(i)) for i in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def _drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny() -> Any:
    torch.manual_seed(1)
    config: Any = hf.GPT2Config(n_layer=3, n_embd=32, n_head=2, n_positions=32, vocab_size=96, use_cache=False)
    return hf.GPT2LMHeadModel(config)


def trained(folder: Path, *callbacks: Any, data: Any = None, model: Any = None, **settings: Any) -> tuple[Any, Any]:
    """A trainer that has trained, and what it has left: parameters, losses, generators' states."""
    given: dict[str, Any] = {"max_steps": 3, "save_strategy": "no", "per_device_train_batch_size": 4} | settings
    arguments = hf.TrainingArguments(
        output_dir=str(folder), report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, seed=0, **given
    )
    model = tiny() if model is None else model
    data = Tokens() if data is None else data
    trainer = hf.Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=Tokens(4), callbacks=[*callbacks]
    )
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    left = {
        "parameters": {key: value.clone() for key, value in trainer.model.state_dict().items()},
        "losses": losses,
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"],
    }
    return trainer, left


def assert_same(one: Any, other: Any) -> None:
    assert one["losses"] == other["losses"]
    assert one["parameters"].keys() == other["parameters"].keys()
    for key, value in one["parameters"].items():
        assert torch.equal(value, other["parameters"][key]), key
    assert torch.equal(one["torch"], other["torch"])
    assert one["python"] == other["python"]
    assert np.array_equal(one["numpy"], other["numpy"])


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "clipped": {"max_grad_norm": 0.1, "lr_scheduler_type": "cosine"},
    "checkpointed": {"activation_checkpointing": True},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1},
    "smoothed": {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("way", sampled(WAYS, "accumulated", "clipped", "checkpointed", "evaluated"))
def test_training_is_the_same_within_the_budget(way: str, tmp_path: Path) -> None:
    _, alone = trained(tmp_path, **WAYS[way])
    budget = MemoryBudget("90%", options=ebbtide.Options(progress=None))
    trainer, left = trained(tmp_path, budget, **WAYS[way])
    assert_same(alone, left)
    assert budget.calls is not None
    assert budget.calls.planned == 3 * WAYS[way].get("gradient_accumulation_steps", 1)
    assert set(budget.calls.unplanned) <= {"no gradients (torch.no_grad or inference_mode)"}, "evaluation"
    assert budget.plan is not None
    assert budget.plan.predicted_peak_bytes <= budget.plan.budget_bytes
    with pytest.raises(UsageError, match="not fitted"):
        ebbtide.plan_of(trainer.model)
    assert trainer.model.is_activation_checkpointing == (way == "checkpointed")


def test_training_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    constant = {"lr_scheduler_type": "constant"}
    saving = constant | {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    _, alone = trained(tmp_path / "all", max_steps=4, **constant)
    trained(tmp_path / "part", MemoryBudget("90%", options=ebbtide.Options(progress=None)), **saving)
    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path / "part"), report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, seed=0,
        per_device_train_batch_size=4, max_steps=4, save_strategy="no", **constant,
    )  # fmt: skip
    budget = MemoryBudget("90%", options=ebbtide.Options(progress=None))
    resumed = hf.Trainer(model=tiny(), args=arguments, train_dataset=Tokens(), callbacks=[budget])
    resumed.train(resume_from_checkpoint=True)
    for key, value in resumed.model.state_dict().items():
        assert torch.equal(value, alone["parameters"][key]), key
    assert budget.calls is not None
    assert (budget.calls.planned, dict(budget.calls.unplanned)) == (2, {})


def test_the_optimizer_of_the_trainer_counts(tmp_path: Path) -> None:
    first = MemoryBudget("90%", options=ebbtide.Options(progress=None))
    trainer, _ = trained(tmp_path, first, max_steps=1)
    weights = sum(each.nbytes for each in trainer.model.parameters())
    assert first.plan is not None
    assert first.plan.resident_bytes >= 3 * weights, "themselves and two moments that are to come"


def test_a_model_that_was_fitted_before_stays_fitted(tmp_path: Path) -> None:
    model = ebbtide.fit(tiny(), "90%", progress=None)
    budget = MemoryBudget("50%", options=ebbtide.Options(progress=None))
    trained(tmp_path, budget, model=model)
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert budget.plan == plan
    assert budget.calls is not None
    assert budget.calls.planned == 3


def test_a_second_budget_on_one_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two MemoryBudgets"):
        trained(
            tmp_path,
            MemoryBudget("90%", options=ebbtide.Options(progress=None)),
            MemoryBudget("80%", options=ebbtide.Options(progress=None)),
        )


class Failing(hf.TrainerCallback):
    """Ends a training after its second step as a callback with a fault does: no callback is told."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise RuntimeError("a fault")


@pytest.mark.parametrize("kept", sampled([True, False], True))
def test_a_training_after_one_that_failed_has_its_own_budget(kept: bool, tmp_path: Path) -> None:
    model, first = tiny(), MemoryBudget("90%", options=ebbtide.Options(progress=None))
    with pytest.raises(RuntimeError, match="a fault"):
        trained(tmp_path, first, Failing(), model=model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    if not kept:
        del first
        gc.collect()
    second = MemoryBudget("80%", options=ebbtide.Options(progress=None))
    _, left = trained(tmp_path, second, model=model)
    plain = tiny()
    plain.load_state_dict(state)
    _, alone = trained(tmp_path, model=plain)
    assert_same(alone, left)
    assert second.calls is not None
    assert second.calls.planned == 3
    assert second.plan is not None
    if kept:
        assert first.plan is not None
        assert first.plan.budget_bytes > second.plan.budget_bytes
        assert first.calls is not None
        assert first.calls.planned == 2
    with pytest.raises(UsageError, match="not fitted"):
        ebbtide.plan_of(model)


REFUSED = {
    "compiled": ({"torch_compile": True, "torch_compile_backend": "eager"}, "torch_compile=True"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_runs_past_the_plan_is_refused_by_name(way: str, tmp_path: Path) -> None:
    settings, message = REFUSED[way]
    with pytest.raises(UsageError, match=message):
        trained(tmp_path, MemoryBudget("90%", options=ebbtide.Options(progress=None)), **settings)


def test_a_step_inside_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='takes no step="inside"'):
        trained(tmp_path, MemoryBudget("90%", options=ebbtide.Options(step="inside", progress=None)))


def test_bad_input_is_refused_where_it_is_given() -> None:
    with pytest.raises(UsageError, match="12GiB"):
        MemoryBudget("lots")
    with pytest.raises(UsageError, match="asks the trainer for its own"):
        MemoryBudget(
            "1GiB", options=ebbtide.Options(optimizer=torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))
        )
    with pytest.raises(UsageError, match="bugdet"):
        MemoryBudget("1GiB", bugdet=3)


class Seen(hf.TrainerCallback):
    """Counts, by Python's own list of objects, the tensors that live where a step begins and did not before."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.before: set[int] = set()
        self.bytes: list[int] = []

    def _living(self) -> dict[int, int]:
        tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
        real = [
            each for each in tensors if each.device.type == "cpu" and not isinstance(each, torch._subclasses.FakeTensor)
        ]
        return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in real}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        own = {each.untyped_storage().data_ptr() for each in self.model.parameters()}
        self.before = self._living().keys() - own

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        gc.collect()
        self.bytes.append(sum(size for key, size in self._living().items() if key not in self.before))


AHEAD: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 3},
    "labels kept back": {"label_smoothing_factor": 0.1},
    "both": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("way", AHEAD)
def test_the_batches_that_a_trainer_holds_are_resident(way: str, tmp_path: Path) -> None:
    model, budget = tiny(), MemoryBudget("100%", options=ebbtide.Options(progress=None, effort=100))
    seen = Seen(model)
    trained(tmp_path, budget, seen, model=model, data=Tokens(48), max_steps=1, **AHEAD[way])
    assert budget.plan is not None
    batch = 2 * 4 * 24 * 8
    state = 2 * sum(each.nbytes for each in model.parameters())
    ahead = AHEAD[way].get("gradient_accumulation_steps", 1) + 1
    (there,) = seen.bytes
    assert there >= sum(each.nbytes for each in model.parameters()) + ahead * batch, "the oracle sees the batches"
    scalars = 256
    assert budget.plan.resident_bytes >= there + state - scalars


def test_a_trainers_budget_may_be_what_its_card_has(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='give a budget: bytes, budget="8GiB"'):  # once the model's device is known
        trained(tmp_path, MemoryBudget("auto"))


def test_memory_is_logged_where_the_trainer_logs(tmp_path: Path) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    memory = MemoryBudget("85%", log=lambda metrics, step: logged.append((step, metrics)))
    trained(tmp_path, memory)
    assert [step for step, _ in logged][:3] == [1, 2, 3]
    assert logged[2][1]["ebbtide/planned_calls"] == 3.0
    assert logged[2][1]["ebbtide/measured_peak_bytes"] <= logged[2][1]["ebbtide/budget_bytes"]

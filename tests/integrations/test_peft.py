"""PEFT's adapters on planned models: put on before and after, switched, merged, saved, and in ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide
from sampled import sampled
from trained_alike import NO_GRADIENTS, assert_left_alike, drawn, left_by, tiny_gpt2

pytest.importorskip("accelerate")
hf = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from ebbtide.integrations.hf import MemoryBudget  # noqa: E402 - needs transformers

# PEFT asks transformers for what that calls something else since.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),
]

_WORDS = {"task_type": "CAUSAL_LM"}
_LAYERS = {"target_modules": ["c_attn"], "fan_in_fan_out": True, **_WORDS}
_VIRTUAL = {"num_virtual_tokens": 4, **_WORDS}
KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: lora(),
    "dora": lambda: lora(use_dora=True),
    "head": lambda: lora(modules_to_save=["lm_head"]),
    "ia3": lambda: peft.IA3Config(feedforward_modules=[], **_LAYERS),
    "adalora": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=100, tinit=1, tfinal=50, **_LAYERS),
    "prompt": lambda: peft.PromptTuningConfig(**_VIRTUAL),
    "prefix": lambda: peft.PrefixTuningConfig(**_VIRTUAL),
}


def lora(**settings: Any) -> Any:
    return peft.LoraConfig(r=4, lora_dropout=0.1, **_LAYERS, **settings)


def adapted(kind: str = "lora", base: Any = None) -> Any:
    base = tiny_gpt2(n_layer=1) if base is None else base
    torch.manual_seed(2)
    return peft.get_peft_model(base, KINDS[kind]()).train()


def fitted(model: Any) -> Any:
    return ebbtide.fit(model, "90%", progress=None, options=ebbtide.Options(effort=300))


def step(model: Any, i: int = 0) -> torch.Tensor:
    """Forward, backward and a step by hand, which leaves no optimizer's state."""
    tokens = drawn(i, 6, 16)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    with torch.no_grad():
        for each in model.parameters():
            if each.grad is not None:
                each -= 0.1 * each.grad
                each.grad = None
    return loss.detach()


def trained(model: Any, *between: Callable[[Any], None]) -> dict[str, Any]:
    """Three steps from one seed, before each of which something is done."""
    torch.manual_seed(3)
    told: list[torch.Tensor] = []
    for i in range(3):
        if i < len(between):
            between[i](model)
        told.append(step(model, i))
    return left_by(model, told)


def assert_planned(model: Any, calls: int, **unplanned: int) -> None:
    """Every training call was, within the budget."""
    counted, plan = ebbtide.calls_of(model), ebbtide.plan_of(model)
    assert (counted.planned, counted.unplanned) == (calls, unplanned)
    assert plan is not None
    assert plan.predicted_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapted_model_trains_alike(kind: str) -> None:
    alone = trained(adapted(kind))
    model = fitted(adapted(kind))
    assert_left_alike(alone, trained(model))
    assert_planned(model, 3)


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_adapters_on_a_fitted_model_are_planned_along(kind: str) -> None:
    alone = trained(adapted(kind))
    base = fitted(tiny_gpt2(n_layer=1))
    assert_left_alike(alone, trained(adapted(kind, base)))
    assert_planned(base, 3)


def second(model: Any) -> None:
    torch.manual_seed(4)
    model.add_adapter("second", lora())
    model.set_adapter("second")


def reference(model: Any) -> None:
    """What preferences are held against: the model without its adapters, and no gradients."""
    tokens = drawn(9, 6, 16)
    with model.disable_adapter(), torch.no_grad():
        model(input_ids=tokens, labels=tokens)


def first_again(model: Any) -> None:
    model.set_adapter("default")


@pytest.mark.long
def test_adapters_are_switched_and_disabled_between_steps() -> None:
    ways = (reference, second, first_again)
    alone = trained(adapted(), *ways)
    model = fitted(adapted())
    assert_left_alike(alone, trained(model, *ways))
    assert_planned(model, 3, **{NO_GRADIENTS: 1})


def merged_in_between(model: Any) -> None:
    model.merge_adapter()
    tokens = drawn(9, 6, 16)
    with torch.no_grad():
        model(input_ids=tokens, labels=tokens)
    model.unmerge_adapter()


def test_adapters_are_merged_in_between() -> None:
    alone = trained(adapted(), reference, merged_in_between, merged_in_between)
    model = fitted(adapted())
    assert_left_alike(alone, trained(model, reference, merged_in_between, merged_in_between))
    assert_planned(model, 3, **{NO_GRADIENTS: 3})


def merged_for_good(base: Any) -> Any:
    model = adapted(base=base)
    trained(model)
    return model.merge_and_unload().requires_grad_(True)


@pytest.mark.long
def test_a_base_whose_adapters_are_merged_for_good_trains_on() -> None:
    alone = trained(merged_for_good(tiny_gpt2(n_layer=1)))
    base = fitted(tiny_gpt2(n_layer=1))
    merged = merged_for_good(base)
    assert merged is base
    assert_left_alike(alone, trained(merged))
    assert_planned(base, 6)


def test_inputs_that_take_gradients_and_checkpoints() -> None:
    """``enable_input_require_grads``, as recipes for LoRA have it."""

    def prepared() -> Any:
        base = tiny_gpt2(n_layer=1)
        base.enable_input_require_grads()
        base.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        return adapted(base=base)

    alone, model = trained(prepared()), fitted(prepared())
    assert_left_alike(alone, trained(model))
    assert_planned(model, 3)


def test_adapters_of_a_fitted_model_are_saved_and_loaded(tmp_path: Path) -> None:
    model = fitted(adapted())
    trained(model)
    model.save_pretrained(str(tmp_path))
    loaded = peft.PeftModel.from_pretrained(tiny_gpt2(n_layer=1), str(tmp_path), is_trainable=True)
    for key, value in peft.get_peft_model_state_dict(model).items():
        assert torch.equal(value, peft.get_peft_model_state_dict(loaded)[key]), key
    expected = trained(loaded.train())
    assert_left_alike(expected, trained(model))
    assert_planned(model, 6)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Of two lengths; of four a batch, the last one is smaller."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = drawn(index, 20 if index < 2 else 14)
        return {"input_ids": row, "labels": row}


def trained_by_trainer(folder: Path, *callbacks: Any, resume: bool = False, **settings: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"num_train_epochs": 1, "save_strategy": "no", "per_device_train_batch_size": 4} | settings
    arguments = hf.TrainingArguments(
        output_dir=str(folder), report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, seed=0,
        dataloader_pin_memory=False, **given,
    )  # fmt: skip
    data = Rows()
    trainer = hf.Trainer(
        model=adapted(), args=arguments, train_dataset=data, eval_dataset=data, callbacks=[*callbacks],
        data_collator=padded,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    return left_by(trainer.model, [each["loss"] for each in trainer.state.log_history if "loss" in each])


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """To the longest of a batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([row["input_ids"] for row in rows], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "lengths": (2, {"max_grad_norm": 0.1}),
    "accumulated in bf16": (2, {"gradient_accumulation_steps": 2, "bf16": True}),
    "smoothed, evaluated, with a worker": (
        2,
        {
            "label_smoothing_factor": 0.1,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "dataloader_num_workers": 1,
            "max_steps": 2,
        },
    ),
    "checkpointed": (1, {"activation_checkpointing": True, "max_steps": 1}),
}


@pytest.mark.parametrize("way", sampled(WAYS, "lengths", "checkpointed"))
def test_adapters_in_trainer(way: str, tmp_path: Path) -> None:
    calls, settings = WAYS[way]
    alone = trained_by_trainer(tmp_path, **settings)
    budget = MemoryBudget("95%", options=ebbtide.Options(progress=None))
    assert_left_alike(alone, trained_by_trainer(tmp_path, budget, **settings))
    assert budget.calls is not None
    assert budget.calls.planned == calls
    assert set(budget.calls.unplanned) <= {NO_GRADIENTS}, "evaluation"


def test_training_of_adapters_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    constant = {"lr_scheduler_type": "constant"}
    alone = trained_by_trainer(tmp_path / "all", max_steps=2, **constant)
    saving = constant | {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trained_by_trainer(tmp_path / "part", MemoryBudget("95%", options=ebbtide.Options(progress=None)), **saving)
    budget = MemoryBudget("95%", options=ebbtide.Options(progress=None))
    resumed = trained_by_trainer(tmp_path / "part", budget, resume=True, max_steps=2, **constant)
    assert_left_alike(alone, resumed)
    assert budget.calls is not None
    assert budget.calls.planned == 1

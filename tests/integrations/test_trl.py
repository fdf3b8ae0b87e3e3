"""TRL's ``SFTTrainer`` and ``DPOTrainer`` with a memory budget: the same training, every step planned."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.errors import CaptureError, UsageError
from sampled import sampled
from trained_alike import NO_GRADIENTS, assert_left_alike, drawn, left_by, tiny_gpt2

pytest.importorskip("accelerate")
hf = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
tokenizers = pytest.importorskip("tokenizers")

import trl.trainer.utils as of_trl  # noqa: E402

from ebbtide.integrations.fused_head import _ops_of, opaque_head  # noqa: E402 - the ops that stand in
from ebbtide.integrations.hf import MemoryBudget  # noqa: E402 - needs transformers

# TRL and PEFT ask transformers for what that calls something else since; TRL warns of what its options do.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*removed in v(6|2):FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(padding|packing|flash):UserWarning"),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's fused head takes 32,768 columns at a time, more than all else of a toy."""
    monkeypatch.setattr(of_trl, "_CHUNKED_LOGPROB_CHUNK_SIZE", 64)


@functools.cache
def tokenizer() -> Any:
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(93))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def supervised(count: int = 10) -> Any:
    """The first two batches of four are of two lengths, the third is smaller."""
    return datasets.Dataset.from_dict({"input_ids": [drawn(i, 14 if i < 4 else 20).tolist() for i in range(count)]})


def pairs(count: int = 8) -> Any:
    """In words: a prompt, and what is preferred to what."""

    def words(k: int, i: int) -> str:
        return "".join(f" w{token - 3}" for token in drawn(100 * k + i, 6 + k).tolist())

    names = ("prompt", "chosen", "rejected")
    return datasets.Dataset.from_dict({name: [words(k, i) for i in range(count)] for k, name in enumerate(names)})


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True
    )
    return peft.get_peft_model(model, config)


def trained(kind: Any, data: Any, folder: Path, *callbacks: Any, lora: bool = False, **settings: Any) -> dict[str, Any]:
    own = {key: settings.pop(key) for key in ("eval_dataset", "compute_loss_func") if key in settings}
    if settings.pop("reference", False):
        own["ref_model"] = tiny_gpt2(n_layer=1)
    model = settings.pop("model", None) or tiny_gpt2(n_layer=1)
    given: dict[str, Any] = {"num_train_epochs": 1, "save_strategy": "no", "per_device_train_batch_size": 4} | settings
    made = trl.SFTConfig if kind is trl.SFTTrainer else trl.DPOConfig
    arguments = made(
        output_dir=str(folder), report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, seed=0,
        dataloader_pin_memory=False, **({"bf16": False} | given),
    )  # fmt: skip
    trainer = kind(
        model=adapted(model) if lora else model, args=arguments, train_dataset=data, processing_class=tokenizer(),
        callbacks=[*callbacks], **own,
    )  # fmt: skip
    trainer.train()
    seen = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "rewards/margins", "eval_loss")
    logged = [each[name] for each in trainer.state.log_history for name in seen if name in each]
    return left_by(trainer.model, logged)


def assert_alike(kind: Any, data: Any, folder: Path, calls: int, share: str = "97%", **settings: Any) -> MemoryBudget:
    alone = trained(kind, data, folder, **settings)
    budget = MemoryBudget(share, options=ebbtide.Options(progress=None))
    assert_left_alike(alone, trained(kind, data, folder, budget, **settings))
    assert budget.calls is not None
    assert budget.calls.planned == calls
    assert set(budget.calls.unplanned) <= {NO_GRADIENTS}
    assert budget.plan is not None
    assert budget.plan.predicted_peak_bytes <= budget.plan.budget_bytes
    assert isinstance(of_trl._ChunkedLogProbFunction, type)
    assert issubclass(of_trl._ChunkedLogProbFunction, torch.autograd.Function), "TRL's own is back"
    return budget


SFT: dict[str, tuple[int, dict[str, Any]]] = {
    "lengths": (3, {"max_grad_norm": 0.1}),
    "accumulated in bf16": (3, {"gradient_accumulation_steps": 2, "bf16": True}),
    "smoothed": (1, {"label_smoothing_factor": 0.1, "max_steps": 1}),
    "adapters": (2, {"lora": True, "max_steps": 2}),
    "no padding": (1, {"padding_free": True, "max_length": None, "max_steps": 1}),
}


@pytest.mark.parametrize("way", sampled(SFT, "lengths", "adapters"))
@pytest.mark.filterwarnings("ignore:code outside the model took")
def test_supervised_fine_tuning_is_the_same(way: str, tmp_path: Path) -> None:
    calls, settings = SFT[way]
    assert_alike(trl.SFTTrainer, supervised(), tmp_path, calls, **settings)


def test_evaluation_in_between(tmp_path: Path) -> None:
    settings = {"eval_dataset": supervised(4), "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    budget = assert_alike(trl.SFTTrainer, supervised(), tmp_path, 2, **settings)
    assert budget.calls is not None
    assert budget.calls.unplanned == {NO_GRADIENTS: 2}


DPO: dict[str, tuple[int, dict[str, Any]]] = {
    "reference": (2, {"reference": True}),
    "adapters": (2, {"lora": True}),
    "precomputed": (2, {"reference": True, "precompute_ref_log_probs": True}),
    "accumulated in bf16": (2, {"reference": True, "gradient_accumulation_steps": 2, "bf16": True}),
}


@pytest.mark.parametrize("way", DPO)
@pytest.mark.filterwarnings("ignore:code outside the model took")
def test_preferences_are_the_same(way: str, tmp_path: Path) -> None:
    """The reference, a model of its own or the adapters switched off, runs between the forward and its backward."""
    calls, settings = DPO[way]
    assert_alike(trl.DPOTrainer, pairs(), tmp_path, calls, **settings)


def test_what_keeps_activations_elsewhere_is_refused_by_name(tmp_path: Path) -> None:
    offloading = trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, activation_offloading=True)
    with pytest.raises(UsageError, match="activation_offloading=True"):
        MemoryBudget("1GiB").on_train_begin(offloading, None, None, model=tiny_gpt2(), optimizer=None)


def test_a_model_that_was_fitted_by_hand_is_pointed_to_the_callback(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"(?s)MemoryBudget.*TRL's fused head"):
        trained(trl.SFTTrainer, supervised(), tmp_path, model=ebbtide.fit(tiny_gpt2(), "1GiB", progress=None))


def test_a_model_that_was_fitted_by_hand_trains_with_the_callback(tmp_path: Path) -> None:
    alone = trained(trl.SFTTrainer, supervised(), tmp_path, max_steps=1)
    model = ebbtide.fit(tiny_gpt2(n_layer=1), "1GiB", progress=None, options=ebbtide.Options(gradients="all"))
    left = trained(trl.SFTTrainer, supervised(), tmp_path, MemoryBudget("1GiB"), model=model, max_steps=1)
    assert_left_alike(alone, left)
    assert ebbtide.calls_of(model).planned == 1


def rows(bias: bool, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
    hidden = torch.randn(12, 8).to(dtype).requires_grad_()
    weight = torch.randn(50, 8).to(dtype).requires_grad_()
    return hidden, weight, torch.randn(50).to(dtype).requires_grad_() if bias else None, torch.randint(50, (12,))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
@pytest.mark.parametrize("entropy", ["used", "unused", "absent"])
def test_the_op_has_the_bits_of_trls_function(bias: bool, cast: torch.dtype | None, entropy: str) -> None:
    function = of_trl._ChunkedLogProbFunction
    outputs = ("entropy", "is_top1") if entropy != "absent" else ("is_top1",)
    given = rows(bias, torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast is not None):
        theirs = function.apply(*given, 0.7, 16, None, 1.0, outputs)
    ours = _ops_of(function)(*given, 0.7, 16, None, 1.0, ",".join(outputs), cast)
    leaves = [each for each in given if each is not None and each.requires_grad]
    gradients = []
    for found in (theirs, ours):
        loss = found[0].square().sum() + (found[1].sum() if entropy == "used" else 0)
        gradients.append(torch.autograd.grad(loss, leaves))
    for one, other in zip(theirs, ours, strict=False):
        assert (one is None and not other.numel()) or torch.equal(one, other)
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_the_op_stands_in_while_it_is_open_and_in_captures_alone() -> None:
    before = of_trl._ChunkedLogProbFunction
    given = rows(True, torch.float32)
    patch = opaque_head()
    assert patch is not None
    try:
        assert of_trl._ChunkedLogProbFunction is not before
        found = of_trl._ChunkedLogProbFunction.apply(*given, 1.0, 16)
        assert "ChunkedLogProb" in type(found[0].grad_fn).__name__
    finally:
        patch.close()
    assert of_trl._ChunkedLogProbFunction is before

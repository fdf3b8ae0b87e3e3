"""QLoRA with bitsandbytes' layers, 8- and 4-bit: PEFT's adapters on them train alike, by hand and in ``Trainer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import CaptureError
from trained_alike import assert_left_alike, drawn, left_by

pytest.importorskip("accelerate")
hf = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

from ebbtide.integrations.hf import MemoryBudget  # noqa: E402 - needs transformers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),
    # bitsandbytes' own
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:bitsandbytes"),
    pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint.*:UserWarning"),
]
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
BITS: dict[str, dict[str, Any]] = {"8": {"load_in_8bit": True}, "4": FOUR}
FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.LlamaConfig(vocab_size=96, num_key_value_heads=2, use_cache=False, **sizes)
    path = tmp_path_factory.mktemp("llama")
    hf.LlamaForCausalLM(config).save_pretrained(path)
    return path


def quantized(saved: Path, bits: str, dtype: torch.dtype, prepared: bool) -> Any:
    compute = {"bnb_4bit_compute_dtype": dtype} if bits == "4" else {}
    config = hf.BitsAndBytesConfig(**BITS[bits], **compute)
    model = hf.AutoModelForCausalLM.from_pretrained(saved, quantization_config=config, dtype=dtype, device_map="cpu")
    if prepared:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(2)
    adapter = peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, adapter).train()


def trained(model: Any, *, fitted: bool = False) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Three steps: what is left, and all gradients on the way."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 0.01)
    if fitted:
        ebbtide.set_optimizer(model, optimizer)
    torch.manual_seed(3)
    told: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for i in range(3):
        tokens = drawn(i, 4, 24)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        told.append(loss.detach())
        gradients += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return left_by(model, told), gradients


def assert_planned(model: Any, calls: int) -> None:
    counted, plan = ebbtide.calls_of(model), ebbtide.plan_of(model)
    assert (counted.planned, counted.unplanned) == (calls, {})
    assert plan is not None
    assert plan.predicted_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize(
    ("bits", "dtype", "prepared"),
    [("8", FLOAT, True), ("8", HALF, False), ("4", HALF, True), ("4", FLOAT, False)],
    ids=["8-float32-prepared", "8-bfloat16", "4-bfloat16-prepared", "4-float32"],
)
def test_adapters_on_quantized_layers_train_alike(bits: str, dtype: torch.dtype, prepared: bool, saved: Path) -> None:
    alone, theirs = trained(quantized(saved, bits, dtype, prepared))
    model = ebbtide.fit(
        quantized(saved, bits, dtype, prepared), "85%", progress=None, options=ebbtide.Options(effort=200)
    )
    left, ours = trained(model, fitted=True)
    assert_left_alike(alone, left)
    assert theirs
    assert all(map(torch.equal, ours, theirs))
    assert_planned(model, 3)


def test_their_kernels_run_once(saved: Path) -> None:
    arguments = {"input_ids": drawn(0, 4, 24), "labels": drawn(0, 4, 24)}
    model = quantized(saved, "4", FLOAT, True)
    plan = ebbtide.plan(model, kwargs=arguments, budget="85%", options=ebbtide.Options(effort=200, progress=None))
    runs = list(zip(plan.program.ops, map(int, plan.timeline.runs), strict=True))
    assert {n for op, n in runs if op.target.startswith("bitsandbytes.")} == {1}
    assert max(n for _, n in runs) > 1


class Layers(nn.Module):
    """By hand: frozen layers of bytes with adapters."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.bytes_ = nn.ModuleList(make().requires_grad_(False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(64, 4, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(4, 64, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, down, up in zip(self.bytes_, self.down, self.up, strict=True):
            x = torch.tanh(layer(x) + up(down(x.float())).to(x.dtype))
        return x.float().square().mean()


def eight() -> Any:
    return bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)


def four() -> Any:
    return bnb.nn.Linear4bit(64, 64, quant_type="nf4", compute_dtype=HALF)


@pytest.mark.parametrize("make", [eight, four])
def test_a_bias_that_is_cast_at_the_first_call_is_refused_until_it_is_cast(make: Any) -> None:
    x = torch.randn(4, 16, 64, dtype=HALF)
    model = ebbtide.fit(Layers(make).to("cpu").train(), "100%", progress=None, options=ebbtide.Options(effort=200))
    with pytest.raises(CaptureError, match=r"Call the model once before.*cast their bias once"):
        model(x)
    assert ebbtide.calls_of(model).planned == 0
    model = Layers(make).to("cpu").train()
    with torch.no_grad():
        model(x)
    ebbtide.fit(model, "100%", progress=None, options=ebbtide.Options(effort=200))
    model(x).backward()
    assert_planned(model, 1)


def test_four_bit_layers_in_eval_mode_are_refused_where_they_pack_their_weights() -> None:
    if not bnb.functional.has_avx512bf16():
        pytest.skip("this machine has no AVX512-BF16, for which they pack")
    model = Layers(lambda: bnb.nn.Linear4bit(64, 64, quant_type="nf4")).to("cpu").train()
    model.bytes_.eval()
    ebbtide.fit(model, "100%", progress=None, options=ebbtide.Options(effort=200))
    with pytest.raises(CaptureError, match=r"have them in training mode"):
        model(torch.randn(4, 16, 64))


@pytest.mark.parametrize("bits", BITS)
def test_in_trainer(bits: str, saved: Path, tmp_path: Path) -> None:
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    rows = [{"input_ids": row, "labels": row} for row in drawn(5, 8, 24)]

    def run(*callbacks: Any) -> tuple[dict[str, Any], list[float]]:
        torch.manual_seed(6)
        arguments = hf.TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, **quiet
        )
        model = quantized(saved, bits, FLOAT, True)
        trainer = hf.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks))
        trainer.train()
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        return left_by(model, losses), losses

    budget = MemoryBudget("90%", options=ebbtide.Options(effort=200, progress=None))
    alone, _ = run()
    fitted, losses = run(budget)
    assert losses
    assert_left_alike(alone, fitted)
    assert budget.calls is not None
    assert (budget.calls.planned, budget.calls.unplanned) == (4, {})

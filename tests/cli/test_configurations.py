"""``hf:PATH`` and the presets: models from configurations on disk, with nothing downloaded and no weights."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from ebbtide.capture.without_memory import without_memory
from ebbtide.case import Case
from ebbtide.cli import app
from ebbtide.cli.cases import load_case
from ebbtide.errors import UsageError
from ebbtide.torch_seams.fake_tensors import FakeTensor
from ebbtide.zoo import PRESETS, build

transformers = pytest.importorskip("transformers")
needs_peft = pytest.mark.skipif(not transformers.utils.is_peft_available(), reason="needs peft")

_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODER = {**_TEXT, "num_key_value_heads": 1, "max_position_embeddings": 64}
_BOTH: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_GPT2 = {**_TEXT, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **_DECODER}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA,
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 16, "layer_types": ["full_attention"] * 2, **_DECODER},
    "GPT2LMHeadModel": {"model_type": "gpt2", **_GPT2},
    "LlamaForSequenceClassification": {"model_type": "llama", "num_labels": 3, **_DECODER},
    "BertForSequenceClassification": {"model_type": "bert", "num_labels": 1, **_TEXT},
    "BertForMaskedLM": {"model_type": "bert", "max_position_embeddings": 64, **_TEXT},
    "T5ForConditionalGeneration": {
        "model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
        "vocab_size": 96, "pad_token_id": 0, "eos_token_id": 1, "n_positions": 64,
    },
    "BartForConditionalGeneration": {"model_type": "bart", "max_position_embeddings": 64, **_BOTH},
    "WhisperForConditionalGeneration": {
        "model_type": "whisper", "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 24, **_BOTH,
    },
    "ViTForImageClassification": {
        "model_type": "vit", "image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 64, "num_labels": 5,
    },
    "ResNetForImageClassification": {
        "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
        "num_labels": 5,
    },
}  # fmt: skip
"""Per class of transformers a tiny configuration; all but LLAMA's are written with the class as their architecture."""


def written(folder: Path, values: dict[str, Any], name: str = "config.json") -> str:
    """The case of a configuration that is written there."""
    path = folder / name
    path.write_text(json.dumps(values), encoding="utf-8")
    return f"hf:{path}"


def of_family(folder: Path, name: str) -> str:
    return written(folder, {"architectures": [name], **FAMILIES[name]})


def loaded(case: str, size: int | None = None, *, fake: bool = True, **sizes: int | str) -> Case:
    made = load_case(case, size, fake=fake, sizes=sizes)
    assert isinstance(made, Case)
    return made


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


def bytes_of(model: torch.nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in model.parameters())


# -- what is built -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_its_own_class_without_memory(name: str, tmp_path: Path) -> None:
    case = loaded(of_family(tmp_path, name), 2)
    assert type(case.model).__name__ == name
    assert case.model.training
    assert all(isinstance(each, FakeTensor) for each in [*case.model.parameters(), *case.kwargs.values()])
    assert all(each.shape[0] == 2 for each in case.kwargs.values())
    values = {key: value for key, value in FAMILIES[name].items() if key != "torch_dtype"}
    own = getattr(transformers, name)(transformers.CONFIG_MAPPING[values["model_type"]](**values))
    assert {key: each.shape for key, each in case.model.named_parameters()} == {
        key: each.shape for key, each in own.named_parameters()
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_of_a_family_is_finite(name: str, tmp_path: Path) -> None:
    case = loaded(of_family(tmp_path, name), 2, fake=False, dtype="float32")
    loss = case.model(**case.kwargs).loss
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    assert any(each.grad is not None and each.grad.any() for each in case.model.parameters())


def test_a_plan_counts_the_weights_that_the_configuration_says(tmp_path: Path) -> None:
    case = written(tmp_path, LLAMA)
    asked = ("plan", case, "--batch", 2, "--length", 16, "--machine", "t4-16gb", "--budget", "100%", "--verbose")
    words, norm = 2 * 96 * 32, 512  # bytes, bfloat16; the allocator gives no fewer
    layer = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 2 * norm  # queries, out; keys, values; feed-forward
    made = run(*asked)
    assert made.exit_code == 0, made.stderr
    assert made.stdout.startswith(f"{tmp_path.name}-t16-b2 fits as it is: ")
    assert f" {(2 * words + 2 * layer + norm) / 1024:.2f} KiB weights" in made.stdout


@needs_peft
@pytest.mark.parametrize(
    ("name", "trained"),
    [
        # rank times inputs and outputs of queries, keys, values, out, gate, up and down
        ("LlamaForCausalLM", 2 * 4 * (2 * 64 + 2 * 48 + 3 * 96)),
        # the projection of all three, out, up and down; which are stored transposed
        ("GPT2LMHeadModel", 2 * 4 * (128 + 64 + 2 * 160)),
        # four projections of the attention, up and down; and the head
        ("ViTForImageClassification", 2 * 4 * (4 * 64 + 2 * 96) + 5 * 33),
    ],
)
def test_adapters_are_trained_in_place_of_the_model(name: str, trained: int, tmp_path: Path) -> None:
    case = of_family(tmp_path, name)
    whole = loaded(case, dtype="bfloat16").model
    adapted = loaded(case, dtype="bfloat16", lora=4)
    assert adapted.name.endswith("-lora4")
    assert sum(each.numel() for each in adapted.model.parameters() if each.requires_grad) == trained
    frozen = sum(each.numel() * each.element_size() for each in adapted.model.parameters() if not each.requires_grad)
    assert frozen == bytes_of(whole)
    told = run("plan", case, "--lora", 4, "--dtype", "bfloat16", "--machine", "t4-16gb", "--budget", "100%")
    assert told.exit_code == 0, told.stderr


def test_sizes_are_those_asked_for(tmp_path: Path) -> None:
    case = of_family(tmp_path, "BartForConditionalGeneration")
    made = loaded(case, batch=3, length=8, layers=1, dtype="float16")
    assert made.kwargs["input_ids"].shape == (3, 8)
    assert {each.dtype for each in made.model.parameters()} == {torch.float16}
    assert (made.model.config.encoder_layers, made.model.config.decoder_layers) == (1, 1)
    images = of_family(tmp_path, "ViTForImageClassification")
    assert loaded(images, image=64).kwargs["pixel_values"].shape == (1, 3, 64, 64)
    mixed = {
        **FAMILIES["Qwen3ForCausalLM"],
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 8,
    }
    assert loaded(written(tmp_path, mixed), layers=3).model.config.layer_types == [
        "full_attention", "sliding_attention", "full_attention"
    ]  # fmt: skip


def test_lengths_end_where_positions_do(tmp_path: Path) -> None:
    assert loaded(written(tmp_path, {**LLAMA, "max_position_embeddings": 9000})).kwargs["labels"].shape == (1, 2048)
    assert loaded(written(tmp_path, LLAMA)).kwargs["labels"].shape == (1, 64)
    assert loaded(written(tmp_path, LLAMA), length=128).kwargs["labels"].shape == (1, 128), "computed positions"
    values = {**_TEXT, "model_type": "roberta", "max_position_embeddings": 66, "pad_token_id": 1}
    roberta = written(tmp_path, {**values, "architectures": ["RobertaForMaskedLM"]})
    assert loaded(roberta).kwargs["input_ids"].shape == (1, 64), "two of 66 are for padding"
    with pytest.raises(UsageError, match="has 64 positions, fewer than a length of 65"):
        loaded(roberta, length=65)


def test_folders_files_and_configurations_without_architectures(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    values = {key: value for key, value in LLAMA.items() if key != "architectures"}
    written(folder, values)
    assert loaded(f"hf:{folder}").name == "my-model-t64-b1"
    assert loaded(written(tmp_path, values, "other.json")).name == "other-t64-b1"
    assert type(loaded(f"hf:{folder}").model).__name__ == "LlamaForCausalLM"


def test_other_commands_take_configurations(tmp_path: Path) -> None:
    case = written(tmp_path, {**LLAMA, "num_hidden_layers": 1})
    on = ("--machine", "t4-16gb")
    found = run("doctor", case, "--length", 8, *on, "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1])["captured"] is True
    limit = ("--budget", "24MiB", "--overhead", "0%", "--effort", 50)
    most = run("max-batch", case, "--length", 32, *limit, *on, "--json")
    assert most.exit_code == 0, most.stderr
    assert json.loads(most.stdout.splitlines()[-1])["batch"] > 1
    images = of_family(tmp_path, "ViTForImageClassification")
    assert "has no length to vary; it takes: batch, layers" in refused("max-batch", images, "--vary", "length", *limit)


# -- what is refused -----------------------------------------------------------------------------------------------


def test_what_names_no_configuration_is_refused(tmp_path: Path) -> None:
    def plan(case: object) -> str:
        return refused("plan", case, "--budget", "1GB")

    assert "there is no file or folder" in plan(f"hf:{tmp_path / 'none'}")
    assert "there is no config.json in" in plan(f"hf:{tmp_path}")
    assert "there is no file or folder ; hf:PATH names" in plan("hf:")
    hub = plan("hf:meta-llama/Meta-Llama-3-8B")
    assert "nothing is downloaded" in hub
    assert "https://huggingface.co/meta-llama/Meta-Llama-3-8B/resolve/main/config.json" in hub
    assert "huggingface.co/gpt2/resolve" in plan("hf:gpt2")
    assert "huggingface.co" not in plan("hf:./gpt2")
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"model_type": "lla', encoding="utf-8")
    assert "is not JSON" in plan(f"hf:{damaged}")
    assert "no entry model_type" in plan(written(tmp_path, {"vocab_size": 3}))
    assert f"name it hf:{tmp_path / 'config.json'}" in plan(written(tmp_path, LLAMA).removeprefix("hf:"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "no model_type 'lama'"),
        ({"architectures": ["LlamaModel"]}, "is of LlamaModel, .* may name: LlamaForCausalLM, LlamaForSequenceClass"),
        ({"architectures": ["Nobody"]}, "is of Nobody, of which no training call is known here"),
        ({"model_type": "clip_vision_model", "architectures": None}, "may name|known are: AutoModelForCausalLM"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn'.*choose one of these"),
        ({"hidden_size": "wide"}, "makes no model"),
    ],
)
def test_configurations_of_no_model_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        loaded(written(tmp_path, {**LLAMA, **changes}))


def test_options_are_refused_where_they_make_no_sense(tmp_path: Path) -> None:
    images = of_family(tmp_path, "ResNetForImageClassification")
    text = written(tmp_path, LLAMA, "llama.json")
    budget = ("--budget", "1GB")
    assert "has no length to choose; it takes: batch, image, layers, dtype, lora" in refused(
        "plan", images, "--length", 8, *budget
    )
    assert "has no layers to choose" in refused("plan", images, "--layers", 1, *budget)
    assert "has no image to choose" in refused("plan", text, "--image", 8, *budget)
    assert "both 2 and 3 were given" in refused("plan", text, "--size", 2, "--batch", 3, *budget)
    assert "--dtype f16 is none of float32, bfloat16, float16" in refused("plan", text, "--dtype", "f16", *budget)
    assert "zoo:mlp_chain has no lora to choose; it takes: batch, layers" in refused(
        "plan", "zoo:mlp_chain", "--lora", 8, *budget
    )
    assert "--dtype is for zoo:NAME and hf:PATH" in refused("plan", "graph.json", "--dtype", "float16", *budget)
    assert "--length is what is to be found" in refused("max-batch", text, "--vary", "length", "--length", 8, *budget)


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(module: str) -> ModuleSpec | None:
        return None if module == package else ModuleSpec(module, None)

    monkeypatch.setattr("ebbtide.zoo.packages.find_spec", found)
    with pytest.raises(UsageError, match=f"needs {package}, which is not installed; pip install {package}"):
        loaded(written(tmp_path, LLAMA), lora=4)


# -- presets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [  # as the safetensors of each say; ties counted once
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("mistral_7b", 7_248_023_552),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_32b", 32_762_123_264),
        ("gpt2_xl", 1_557_611_200),
        ("vit_l", 304_326_632),
        ("whisper_large", 1_543_490_560),
    ],
)
def test_a_preset_has_the_published_parameters_and_takes_no_memory(name: str, count: int) -> None:
    with without_memory():
        case = build(name)
    assert sum(each.numel() for each in case.model.parameters()) == count
    assert all(isinstance(each, FakeTensor) for each in case.model.parameters())


def test_every_preset_is_counted_above() -> None:
    [mark] = test_a_preset_has_the_published_parameters_and_takes_no_memory.pytestmark  # type: ignore[attr-defined]
    assert sorted(name for name, _ in mark.args[1]) == sorted(PRESETS)


def test_a_preset_too_large_for_any_memory_here_is_planned() -> None:
    asked = ("zoo:llama3_70b", "--layers", 1, "--length", 64, "--machine", "h100-80gb", "--effort", 50)
    made = run("plan", *asked, "--budget", "40GiB", "--json")
    assert made.exit_code == 0, made.stderr
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672 + 2 * 8192
    weights = 2 * (2 * 128_256 * 8192 + layer + 8192)
    told = json.loads(made.stdout.splitlines()[-1])
    assert weights < told["resident_bytes"] < weights + (1 << 27)

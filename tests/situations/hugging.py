"""Models of Hugging Face's library from configurations, tiny, with the loss inside and dropout as it comes."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from situations.registry import Refusal, situation, variants
from situations.run import Run

PRELOAD = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")

_TEXT = {"vocab_size": 96}
_ENCODER = {**_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_DECODER = {**_ENCODER, "num_key_value_heads": 1, "max_position_embeddings": 64, "use_cache": False}
_SEQ2SEQ = {
    **_TEXT, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "use_cache": False,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_IMAGE = {"image_size": 32, "num_labels": 5}


def _words(run: Run, i: int) -> dict[str, Any]:
    tokens = run.tokens(i, 4, 16, most=90) + 3
    return {"input_ids": tokens, "labels": tokens}


def _classified(run: Run, i: int) -> dict[str, Any]:
    return {"input_ids": run.tokens(i, 4, 16, most=90) + 3, "labels": torch.arange(4) % 2}


def _masked(run: Run, i: int) -> dict[str, Any]:
    """With an attention mask, and labels of which some are ignored."""
    tokens = run.tokens(i, 4, 16, most=90) + 3
    mask = torch.ones_like(tokens)
    mask[:2, 12:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def _images(run: Run, i: int) -> dict[str, Any]:
    return {"pixel_values": run.x(i, 4, 3, 32, 32), "labels": torch.arange(4) % 5}


def _segmented(run: Run, i: int) -> dict[str, Any]:
    return {"pixel_values": run.x(i, 2, 3, 32, 32), "labels": run.tokens(i, 2, 32, 32, most=5)}


def _paired(run: Run, i: int) -> dict[str, Any]:
    return {"input_ids": run.tokens(i, 4, 8, most=90) + 3, "pixel_values": run.x(i, 4, 3, 32, 32), "return_loss": True}


def _features(run: Run, i: int) -> dict[str, Any]:
    return {"input_features": run.x(i, 2, 16, 64), "labels": run.tokens(i, 2, 8, most=90) + 3}


def _waves(run: Run, i: int) -> dict[str, Any]:
    return {"input_values": run.x(i, 2, 1600), "labels": run.tokens(i, 2, 6, most=20) + 3}


def _answers(run: Run, i: int) -> dict[str, Any]:
    tokens = run.tokens(i, 4, 16, most=90) + 3
    return {"input_ids": tokens, "start_positions": torch.arange(4), "end_positions": torch.arange(4) + 3}


_CLIP = {
    "text_config": {**_ENCODER, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1},
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 8,
    },
    "projection_dim": 16,
}  # fmt: skip
_WAVE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 32,
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip

MODELS: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {
        **_TEXT, "n_embd": 32, "n_layer": 2, "n_head": 2, "use_cache": False}, _words),
    "gpt2_masked": ("GPT2Config", "GPT2LMHeadModel", {
        **_TEXT, "n_embd": 32, "n_layer": 2, "n_head": 2, "use_cache": False}, _masked),
    "gpt_neo": ("GPTNeoConfig", "GPTNeoForCausalLM", {
        **_TEXT, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]],
        "window_size": 8, "use_cache": False, "max_position_embeddings": 64}, _words),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**_ENCODER, "use_cache": False}, _words),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER, _words),
    "llama_masked": ("LlamaConfig", "LlamaForCausalLM", _DECODER, _masked),
    "llama_eager": ("LlamaConfig", "LlamaForCausalLM", {
        **_DECODER, "attn_implementation": "eager", "attention_dropout": 0.1}, _words),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_DECODER, "sliding_window": 8}, _words),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _DECODER, _words),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_DECODER, "head_dim": 16}, _words),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_DECODER, "head_dim": 16}, _words),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_DECODER, "head_dim": 16, "sliding_window": 8}, _words),
    "phi": ("PhiConfig", "PhiForCausalLM", {**_DECODER, "num_key_value_heads": 2}, _words),
    "opt": ("OPTConfig", "OPTForCausalLM", {
        **_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64,
        "use_cache": False,
        "word_embed_proj_dim": 32, "max_position_embeddings": 64}, _words),
    "bloom": ("BloomConfig", "BloomForCausalLM", {
        **_TEXT, "hidden_size": 32, "n_layer": 2, "n_head": 2, "use_cache": False}, _words),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**_ENCODER, "use_cache": False, "alibi": False}, _words),
    "mamba": ("MambaConfig", "MambaForCausalLM", {
        **_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "use_cache": False,
        "time_step_rank": 4}, _words),
    "bert": ("BertConfig", "BertForMaskedLM", _ENCODER, _masked),
    "bert_classifier": ("BertConfig", "BertForSequenceClassification", _ENCODER, _classified),
    "bert_answers": ("BertConfig", "BertForQuestionAnswering", _ENCODER, _answers),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _ENCODER, _masked),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**_ENCODER, "embedding_size": 16}, _masked),
    "mpnet": ("MPNetConfig", "MPNetForMaskedLM", _ENCODER, _masked),
    "deberta_v2": ("DebertaV2Config", "DebertaV2ForMaskedLM", {
        **_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 16},
        _masked),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", {
        **_ENCODER, "local_attention": 8, "pad_token_id": 0, "reference_compile": False}, _masked),
    "xlnet": ("XLNetConfig", "XLNetLMHeadModel", {
        **_TEXT, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}, _words),
    "t5": ("T5Config", "T5ForConditionalGeneration", {
        **_TEXT, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "use_cache": False,
        "decoder_start_token_id": 0}, _masked),
    "bart": ("BartConfig", "BartForConditionalGeneration", _SEQ2SEQ, _words),
    "m2m100": ("M2M100Config", "M2M100ForConditionalGeneration", {
        **_SEQ2SEQ, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, _words),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", {
        **_SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32}, _features),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForCTC", {**_WAVE, "layerdrop": 0.0}, _waves),
    "vit": ("ViTConfig", "ViTForImageClassification", {
        **_IMAGE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "patch_size": 8}, _images),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", {
        **_IMAGE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8,
        "drop_path_rate": 0.1}, _images),
    "swin": ("SwinConfig", "SwinForImageClassification", {
        **_IMAGE, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 2,
        "drop_path_rate": 0.0}, _images),
    "convnext": ("ConvNextConfig", "ConvNextForImageClassification", {
        **_IMAGE, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.1}, _images),
    "resnet": ("ResNetConfig", "ResNetForImageClassification", {
        "num_labels": 5, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        _images),
    "mobilenet_v2": ("MobileNetV2Config", "MobileNetV2ForImageClassification", {
        **_IMAGE, "depth_multiplier": 0.25}, _images),
    "segformer": ("SegformerConfig", "SegformerForSemanticSegmentation", {
        "num_labels": 5, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
        "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
        "decoder_hidden_size": 16, "drop_path_rate": 0.0}, _segmented),
    "clip": ("CLIPConfig", "CLIPModel", _CLIP, _paired),
    "siglip": ("SiglipConfig", "SiglipModel", {key: _CLIP[key] for key in ("text_config", "vision_config")}, _paired),
}  # fmt: skip


def _built(case: tuple[str, str, dict[str, Any], Any]) -> Any:
    config, model, settings, _ = case
    return getattr(hf, model)(getattr(hf, config)(**settings)).train()


# Their first forward writes to their configuration (``problem_type``), of which the step is a part.
_CONFIGURED = ("bert_classifier", "vit", "dinov2", "swin", "convnext", "resnet", "mobilenet_v2")
_REFUSED = {
    # labels.max() >= vocab_size, in Python; later releases of transformers switch cuDNN off around the loss first.
    "wav2vec2": Refusal("CaptureError", "data-dependent|cuDNN"),
}
_LIMITED = {"mamba": "asks whether it is compiled"}


@variants(
    {name: case for name, case in MODELS.items() if name not in (*_CONFIGURED, *_REFUSED, *_LIMITED)},
    share=1.1,
    seconds=400.0,
)
def model(run: Run, case: Any) -> None:
    """Loss inside, as it comes from the library, through two optimizer steps."""
    _trained(run, case)


@variants({name: MODELS[name] for name in _CONFIGURED}, share=1.1, seconds=400.0, captures=2)
def model_configured_by_its_first_batch(run: Run, case: Any) -> None:
    _trained(run, case)


@variants({"mamba": MODELS["mamba"]}, share=1.1, seconds=400.0, limit="models that ask whether they are compiled")
def model_that_asks(run: Run, case: Any) -> None:
    _trained(run, case)


@situation(share=1.1, refused=_REFUSED["wav2vec2"])
def model_wav2vec2(run: Run) -> None:
    _trained(run, MODELS["wav2vec2"])


def _trained(run: Run, case: Any) -> None:
    batch = case[3]

    def step(m: Any, i: int) -> Any:
        loss = m(**batch(run, i)).loss
        loss.backward()
        return loss.detach()

    run.train(_built(case), step, steps=3, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))


@variants({name: MODELS[name] for name in ("gpt2", "llama", "bert", "t5")}, share=0.85, seconds=400.0)
def tight(run: Run, case: Any) -> None:
    """Batches large enough for activations to be most of it; the whole output kept alive."""
    _tight(run, case)


@situation(share=0.85, seconds=400.0, captures=2)
def tight_vit(run: Run) -> None:
    _tight(run, MODELS["vit"])


def _tight(run: Run, case: Any) -> None:
    batch = case[3]
    model = run.fit(_built(case))
    for i in range(4):
        model.zero_grad()
        parts = [batch(run, 10 * i + k) for k in range(8)]
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        del parts
        with run.step():
            out = model(**whole)
            out.loss.backward()
        run.see_model(model, f"step {i}")
        run.see(f"loss {i}", out.loss)


@variants({name: MODELS[name] for name in ("gpt2", "bert", "t5")}, share=1.1, seconds=400.0)
def autocast(run: Run, case: Any) -> None:
    """bf16 autocast with the library's dropouts."""
    _cast(run, case)


@situation(share=1.1, seconds=400.0, limit="models that ask whether they are compiled")
def autocast_llama(run: Run) -> None:
    """Key and value heads that queries share: transformers repeats them where it is compiled, and torch in eager."""
    _cast(run, MODELS["llama"])


def _cast(run: Run, case: Any) -> None:
    batch = case[3]

    def step(m: Any, i: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = m(**batch(run, i)).loss
        loss.backward()
        return loss.detach()

    run.train(_built(case), step, steps=3)


@variants({name: MODELS[name] for name in ("gpt2", "llama", "bert")}, share=1.3, seconds=400.0)
def gradient_checkpointing(run: Run, case: Any) -> None:
    """``gradient_checkpointing_enable()`` with ``enable_input_require_grads()``, all frozen but one layer."""
    batch, made = case[3], _built(case)
    made.requires_grad_(False)
    for name, parameter in made.named_parameters():
        if ".0." in name or ".1." in name:
            parameter.requires_grad_("bias" in name or "norm" in name)
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made.enable_input_require_grads()

    def step(m: Any, i: int) -> Any:
        loss = m(**batch(run, i)).loss
        loss.backward()
        return loss.detach()

    run.train(made, step, steps=3)


@situation(refused=Refusal("CaptureError", "layerdrop"), share=1.1)
def m2m100_layerdrop(run: Run) -> None:
    """At the configuration's default of 0.05: the refusal names the fields to set."""
    config, name, settings, batch = MODELS["m2m100"]
    made = _built((config, name, {**settings, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}, batch))

    def step(m: Any, i: int) -> Any:
        loss = m(**batch(run, i)).loss
        loss.backward()
        return loss.detach()

    run.train(made, step, steps=3)


@situation(refused=Refusal("CaptureError", "random|draw|mask_time_prob|numpy"), either=True, share=1.1, captures=-1)
def wav2vec2_masks(run: Run) -> None:
    """SpecAugment draws its masks by NumPy."""
    config, name, settings, batch = MODELS["wav2vec2"]
    made = _built((config, name, {**settings, "layerdrop": 0.0, "mask_time_prob": 0.2, "mask_time_length": 2}, batch))

    made.freeze_feature_encoder()  # else it sets requires_grad of its input, which is refused

    def step(m: Any, i: int) -> Any:
        loss = m(batch(run, i)["input_values"]).logits.square().mean()
        loss.backward()
        return loss.detach()

    run.train(made, step, steps=3)


@situation(share=1.2)
def clip_loss_outside(run: Run) -> None:
    """Features and ``logit_scale`` from the model, the loss outside."""
    made = _built(MODELS["clip"])

    def step(m: Any, i: int) -> Any:
        given = _paired(run, i)
        given.pop("return_loss")
        out = m(**given)
        loss = torch.nn.functional.cross_entropy(out.logits_per_text, torch.arange(4))
        del out
        loss.backward()
        return loss.detach()

    run.train(made, step, steps=4)


@situation(share=1.2)
def bert_features(run: Run) -> None:
    """``BertModel`` with a head of one's own outside."""
    made = hf.BertModel(hf.BertConfig(**_ENCODER)).train()

    def step(m: Any, i: int) -> Any:
        loss = m(run.tokens(i, 8, 16, most=90)).last_hidden_state[:, 0].square().mean()
        loss.backward()
        return loss.detach()

    run.train(made, step, steps=4)


@situation(share=1.2)
def generation_between(run: Run) -> None:
    """``generate`` between steps runs unplanned under ``no_grad``."""
    model = run.fit(_built(MODELS["gpt2"]))
    for i in range(3):
        model.zero_grad()
        given = _words(run, i)
        with run.step():
            loss = model(**given).loss
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        model.eval()
        with torch.no_grad():
            run.see(
                f"generated {i}",
                model.generate(
                    given["input_ids"][:1, :4], max_new_tokens=3, do_sample=False, use_cache=True, pad_token_id=0
                ),
            )
        model.train()
        run.see_model(model, f"step {i}")

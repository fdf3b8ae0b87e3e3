"""Models that people know, by the figures of their public configurations; weights and files of theirs are not needed.

Each has the entries of its ``config.json`` that decide what a training step takes, from the source beside it, and the
dtype that this says. ``configured`` makes the models.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ebbtide.zoo.configured import Configuration, of_images, of_text

__all__ = ["PRESETS"]

_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_FIGURES: dict[str, dict[str, Any]] = {
    "llama3_8b": {  # huggingface.co/meta-llama/Meta-Llama-3-8B
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama3_70b": {  # huggingface.co/meta-llama/Meta-Llama-3-70B
        **_LLAMA3,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "mistral_7b": {  # huggingface.co/mistralai/Mistral-7B-v0.3, which has no sliding window
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": 32_768,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "qwen3_8b": {  # huggingface.co/Qwen/Qwen3-8B
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3_32b": {  # huggingface.co/Qwen/Qwen3-32B
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "gpt2_xl": {  # huggingface.co/openai-community/gpt2-xl
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 50_257,
        "n_positions": 1024,
        "n_embd": 1600,
        "n_layer": 48,
        "n_head": 25,
    },
    "vit_l": {  # huggingface.co/google/vit-large-patch16-224
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": 1000,  # the file lists their names
    },
    "whisper_large": {  # huggingface.co/openai/whisper-large-v3
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": 51_866,
        "d_model": 1280,
        "encoder_layers": 32,
        "decoder_layers": 32,
        "encoder_attention_heads": 20,
        "decoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "decoder_ffn_dim": 5120,
        "num_mel_bins": 128,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "decoder_start_token_id": 50_258,
        "pad_token_id": 50_256,
        "bos_token_id": 50_257,
        "eos_token_id": 50_257,
        "torch_dtype": "float16",
    },
}

PRESETS = {
    name: partial(of_images if name == "vit_l" else of_text, Configuration(f"zoo:{name}", name, figures))
    for name, figures in _FIGURES.items()
}
"""Per name the function of its case: of the batch, and of its other sizes by name."""

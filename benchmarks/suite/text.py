"""Classes of Hugging Face for text: class, configuration, settings and batch.

Two to four layers of a width of 128, a vocabulary of 1,024 and 2,048 tokens a step, so that activations are several
times the parameters. All else, dropout among it, is as the configuration has it, but for ``use_cache`` and for layers
left out at random (``layerdrop``), which a program fixed in advance cannot do: the refusal names those fields.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suite.batches import LENGTH, VOCABULARY, answers, brief, classified, masked, words

__all__ = ["TEXT", "Entry"]

Entry = tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]
"""Configuration class, its settings, and the batch."""

_WORDS = {"vocab_size": VOCABULARY}
_LONG = {"max_position_embeddings": LENGTH + 8}
ENCODER = {
    **_WORDS, **_LONG, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512,
}  # fmt: skip
_CAUSAL = {**ENCODER, "is_decoder": True, "use_cache": False}
_DECODER = {**ENCODER, "num_key_value_heads": 2, "use_cache": False}
_GEMMA = {**_DECODER, "head_dim": 32, "sliding_window": 64}
_SEQ2SEQ = {
    **_WORDS, **_LONG, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "use_cache": False,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_GPT2 = {**_WORDS, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": LENGTH, "use_cache": False}
_T5 = {
    **_WORDS, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4, "use_cache": False,
    "decoder_start_token_id": 0,
}  # fmt: skip
_DISTIL = {**_WORDS, **_LONG, "dim": 128, "n_layers": 3, "n_heads": 4, "hidden_dim": 512}
_MOBILE = {**_WORDS, **_LONG, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
           "intermediate_size": 256, "embedding_size": 64, "intra_bottleneck_size": 64}  # fmt: skip
_NEO = {
    **_WORDS, **_LONG, "hidden_size": 128, "num_layers": 4, "num_heads": 4, "window_size": 64, "use_cache": False,
    "attention_types": [[["global", "local"], 2]],
}  # fmt: skip
_GPTJ = {**_GPT2, "rotary_dim": 16}
_DEBERTA = {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 64}
_EXPERTS = {**_DECODER, "intermediate_size": 256, "num_experts_per_tok": 2}
_TO_PAD = {"pad_token_id": 0, "num_labels": 2, "problem_type": "single_label_classification"}

TEXT: dict[str, Entry] = {
    "AlbertForMaskedLM": ("AlbertConfig", {**ENCODER, "embedding_size": 64}, masked),
    "AlbertForQuestionAnswering": ("AlbertConfig", {**ENCODER, "embedding_size": 64}, answers),
    "BertForMaskedLM": ("BertConfig", ENCODER, masked),
    "BertForQuestionAnswering": ("BertConfig", ENCODER, answers),
    "CamembertForMaskedLM": ("CamembertConfig", ENCODER, masked),
    "RobertaForCausalLM": ("RobertaConfig", _CAUSAL, words),
    "RobertaForQuestionAnswering": ("RobertaConfig", ENCODER, answers),
    "DistilBertForMaskedLM": ("DistilBertConfig", _DISTIL, masked),
    "DistilBertForQuestionAnswering": ("DistilBertConfig", _DISTIL, answers),
    "ElectraForCausalLM": ("ElectraConfig", {**_CAUSAL, "embedding_size": 64}, words),
    "ElectraForQuestionAnswering": ("ElectraConfig", {**ENCODER, "embedding_size": 64}, answers),
    "MobileBertForMaskedLM": ("MobileBertConfig", _MOBILE, masked),
    "MobileBertForQuestionAnswering": ("MobileBertConfig", _MOBILE, answers),
    "FNetForMaskedLM": ("FNetConfig", ENCODER, words),
    "ConvBertForMaskedLM": ("ConvBertConfig", {**ENCODER, "embedding_size": 64}, masked),
    "LayoutLMForMaskedLM": ("LayoutLMConfig", ENCODER, masked),
    "LayoutLMForSequenceClassification": ("LayoutLMConfig", {**ENCODER, **_TO_PAD}, classified),
    "LongformerForMaskedLM": ("LongformerConfig", {**ENCODER, "attention_window": 32}, masked),
    "MegatronBertForCausalLM": ("MegatronBertConfig", _CAUSAL, words),
    "MegatronBertForQuestionAnswering": ("MegatronBertConfig", ENCODER, answers),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", _DEBERTA, masked),
    "DebertaV2ForQuestionAnswering": ("DebertaV2Config", _DEBERTA, answers),
    "ModernBertForMaskedLM": ("ModernBertConfig", {**ENCODER, "local_attention": 64, "pad_token_id": 0}, masked),
    "XLNetLMHeadModel": ("XLNetConfig", {
        **_WORDS, "d_model": 128, "n_layer": 3, "n_head": 4, "d_inner": 512}, words),
    "GPT2LMHeadModel": ("GPT2Config", _GPT2, words),
    "GPT2ForSequenceClassification": ("GPT2Config", {**_GPT2, **_TO_PAD}, classified),
    "OPTForCausalLM": ("OPTConfig", {
        **_WORDS, **_LONG, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 512,
        "word_embed_proj_dim": 128, "use_cache": False}, words),
    "XGLMForCausalLM": ("XGLMConfig", {
        **_WORDS, **_LONG, "d_model": 128, "ffn_dim": 512, "num_layers": 3, "attention_heads": 4, "use_cache": False},
        words),
    "TrOCRForCausalLM": ("TrOCRConfig", {
        **_WORDS, **_LONG, "d_model": 128, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 512,
        "use_cache": False}, words),
    "GPTNeoForCausalLM": ("GPTNeoConfig", _NEO, words),
    "GPTNeoForSequenceClassification": ("GPTNeoConfig", {**_NEO, **_TO_PAD}, classified),
    "GPTJForCausalLM": ("GPTJConfig", _GPTJ, words),
    "GPTJForQuestionAnswering": ("GPTJConfig", _GPTJ, answers),
    "T5ForConditionalGeneration": ("T5Config", _T5, masked),
    "MT5ForConditionalGeneration": ("MT5Config", _T5, masked),
    "BartForCausalLM": ("BartConfig", _SEQ2SEQ, words),
    "BartForConditionalGeneration": ("BartConfig", _SEQ2SEQ, words),
    "MBartForCausalLM": ("MBartConfig", _SEQ2SEQ, words),
    "MBartForConditionalGeneration": ("MBartConfig", _SEQ2SEQ, words),
    "PLBartForCausalLM": ("PLBartConfig", _SEQ2SEQ, words),
    "PLBartForConditionalGeneration": ("PLBartConfig", _SEQ2SEQ, words),
    "PegasusForCausalLM": ("PegasusConfig", _SEQ2SEQ, words),
    "PegasusForConditionalGeneration": ("PegasusConfig", _SEQ2SEQ, words),
    "BlenderbotForCausalLM": ("BlenderbotConfig", _SEQ2SEQ, words),
    "BlenderbotForConditionalGeneration": ("BlenderbotConfig", _SEQ2SEQ, words),
    "BlenderbotSmallForCausalLM": ("BlenderbotSmallConfig", _SEQ2SEQ, words),
    "BlenderbotSmallForConditionalGeneration": ("BlenderbotSmallConfig", _SEQ2SEQ, words),
    "M2M100ForConditionalGeneration": ("M2M100Config", _SEQ2SEQ, words),
    "LlamaForCausalLM": ("LlamaConfig", _DECODER, words),
    "MistralForCausalLM": ("MistralConfig", {**_DECODER, "sliding_window": 64}, words),
    "Gemma2ForCausalLM": ("Gemma2Config", _GEMMA, words),
    "Qwen3ForCausalLM": ("Qwen3Config", {**_DECODER, "head_dim": 32}, words),
    "MixtralForCausalLM": ("MixtralConfig", {**_EXPERTS, "num_local_experts": 4}, words),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {
        **_EXPERTS, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 256}, words),
    "GptOssForCausalLM": ("GptOssConfig", {
        **_EXPERTS, "head_dim": 32, "num_local_experts": 4, "sliding_window": 64}, words),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {
        **_DECODER, "num_key_value_heads": 4, "moe_intermediate_size": 128, "n_routed_experts": 4, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 32,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}, words),
    "MambaForCausalLM": ("MambaConfig", {
        **_WORDS, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 8,
        "use_cache": False}, brief),
    "Mamba2ForCausalLM": ("Mamba2Config", {
        **_WORDS, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 16, "num_heads": 8, "head_dim": 32,
        "n_groups": 1, "chunk_size": 32, "use_cache": False}, words),
}  # fmt: skip

"""Hugging Face's own models from their configurations, as their users train them: no wrapper, no download.

Each case is the plain model, called by keyword with ``labels``, dropout on; its output has ``.loss``. transformers is
an extra, imported when one of these is built. ``use_cache=False`` because training reads no cache of keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ebbtide.case import Case
from ebbtide.zoo.inputs import integers
from ebbtide.zoo.packages import require_package

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["hf_bert", "hf_gpt2", "hf_llama", "hf_t5"]


def hf_gpt2(
    batch: int = 2, *, vocabulary: int = 8192, length: int = 128, layers: int = 12, width: int = 256, heads: int = 8
) -> Case:
    """A training call of ``GPT2LMHeadModel``; GPT-2 itself has a vocabulary of 50257 and width 768, 12 heads."""
    require_package("transformers", "zoo:hf_gpt2")
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _case("hf_gpt2", GPT2LMHeadModel(config), batch, _causal(vocabulary, batch, length))


def hf_llama(
    batch: int = 2, *, vocabulary: int = 8192, length: int = 128, layers: int = 8, width: int = 256, heads: int = 8
) -> Case:
    """A training call of ``LlamaForCausalLM`` with half as many key and value heads, attention dropout 0.1."""
    require_package("transformers", "zoo:hf_llama")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=8 * width // 3,  # Shazeer 2020: two thirds of four times the width
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        attention_dropout=0.1,
        use_cache=False,
    )
    return _case("hf_llama", LlamaForCausalLM(config), batch, _causal(vocabulary, batch, length))


def hf_bert(
    batch: int = 4, *, vocabulary: int = 8192, length: int = 128, layers: int = 12, width: int = 256, heads: int = 8
) -> Case:
    """A training call of ``BertForMaskedLM``; BERT base has a vocabulary of 30522 and width 768, 12 heads."""
    require_package("transformers", "zoo:hf_bert")
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
    )
    arguments = {
        "input_ids": integers(vocabulary, batch, length),
        "attention_mask": torch.ones(batch, length, dtype=torch.int64),
        "labels": integers(vocabulary, batch, length, seed=2),
    }
    return _case("hf_bert", BertForMaskedLM(config), batch, arguments)


def hf_t5(
    batch: int = 4, *, vocabulary: int = 8192, length: int = 64, layers: int = 6, width: int = 256, heads: int = 8
) -> Case:
    """A training call of ``T5ForConditionalGeneration``, ``layers`` down and up; T5 small has width 512, 8 heads."""
    require_package("transformers", "zoo:hf_t5")
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocabulary,
        num_layers=layers,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_heads=heads,
        use_cache=False,
    )
    config.decoder_start_token_id = 0  # T5 starts with the padding token
    arguments = {
        "input_ids": integers(vocabulary, batch, length),
        "labels": integers(vocabulary, batch, length, seed=2),
    }
    return _case("hf_t5", T5ForConditionalGeneration(config), batch, arguments)


def _causal(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Arguments of a decoder-only model, which shifts its labels itself."""
    tokens = integers(vocabulary, batch, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _case(name: str, model: PreTrainedModel, batch: int, arguments: dict[str, Any]) -> Case:
    """The model in training mode with its call."""
    length = arguments["input_ids"].shape[1]
    return Case(model.train(), kwargs=arguments, name=f"{name}-t{length}-b{batch}")

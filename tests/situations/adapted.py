"""PEFT's adapters: put on before and after ``fit``, switched, merged, saved, and in Hugging Face's ``Trainer``."""

from __future__ import annotations

import warnings
from typing import Any

import peft
import torch
import transformers as hf

from situations.registry import Refusal, situation, variants
from situations.run import Run
from situations.trainers import (
    CALLBACK,
    LAST_BATCH,
    MOST_CAPTURES,
    _Data,
    grouped,
    resumed,
    tiny_gpt2,
    with_callback,
)

PRELOAD = (
    "accelerate",
    "peft",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)

_WORDS = {"task_type": "CAUSAL_LM"}
_ON_GPT2 = {"target_modules": ["c_attn", "c_proj"], **_WORDS}
_ON_LLAMA = {"target_modules": ["q_proj", "down_proj"], **_WORDS}


def tiny_llama(**settings: Any) -> Any:
    given = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 96,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    return hf.LlamaForCausalLM(hf.LlamaConfig(**(given | settings)))


def _lora(**settings: Any) -> Any:
    return peft.LoraConfig(**({"r": 4, "lora_dropout": 0.1, **_ON_GPT2} | settings))


KINDS: dict[str, Any] = {
    "lora": lambda: _lora(),
    "dora": lambda: _lora(use_dora=True),
    "rslora": lambda: _lora(use_rslora=True, lora_bias=True),
    "pissa": lambda: _lora(init_lora_weights="pissa"),
    "head_trained": lambda: _lora(modules_to_save=["lm_head"]),
    "embedding": lambda: _lora(target_modules=["c_attn", "wte"]),
    "tokens_trained": lambda: _lora(trainable_token_indices=[1, 2]),
    "ia3": lambda: peft.IA3Config(feedforward_modules=["c_proj"], **_ON_GPT2),
    "adalora": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=100, tinit=1, tfinal=50, **_ON_GPT2),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, **_ON_LLAMA),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["c_attn"], **_WORDS),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **_WORDS),
    "p_tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, **_WORDS),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **_WORDS),
    "prefix_projected": lambda: peft.PrefixTuningConfig(
        num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=16, **_WORDS
    ),
}


def _made(kind: Any = None, base: Any = None) -> Any:
    config = _lora() if kind is None else kind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(_base(config) if base is None else base, config)


def _base(config: Any) -> Any:
    on_llama = "q_proj" in (getattr(config, "target_modules", None) or ())
    return tiny_llama() if on_llama else tiny_gpt2()


def _step(run: Run, rows: int = 8, columns: int = 20) -> Any:
    def step(model: Any, i: int) -> Any:
        tokens = run.tokens(i, rows, columns, most=96)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    return step


def _adam(parameters: Any) -> Any:
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=1e-2)


@variants(KINDS, share=0.9)
def peft_before(run: Run, kind: Any) -> None:
    """``fit(get_peft_model(...))``."""
    run.train(_made(kind).train(), _step(run), optimizer=_adam)


@variants(KINDS, share=0.9, captures=-1, calls=4)
def peft_after(run: Run, kind: Any) -> None:
    """``get_peft_model`` of a model that was fitted."""
    base = run.fit(_base(kind()))
    model = _made(kind, base).train()
    adam, step = _adam(model.parameters()), _step(run)
    for i in range(4):
        model.zero_grad()
        with run.step(bytes_beside=_state_bytes(adam)):
            loss = step(model, i)
        run.see(f"loss {i}", loss)
        run.see_model(model, f"step {i}")
        adam.step()


@situation(share=1.2, refused=Refusal("CaptureError", "[Dd]ata-dependent|branches on a value"))
def peft_loha(run: Run) -> None:
    """Its layers ask ``torch.rand(1) > module_dropout``, at a rate of 0 as well, where it may be either."""
    run.train(_made(lambda: peft.LoHaConfig(r=4, **_ON_LLAMA)).train(), _step(run))


def _state_bytes(adam: Any) -> int:
    return sum(v.nbytes for each in adam.state.values() for v in each.values() if isinstance(v, torch.Tensor))


@variants({name: KINDS[name] for name in ("lora", "dora", "ia3", "prompt", "prefix")}, share=0.9)
def peft_trainer(run: Run, kind: Any) -> None:
    with_callback(run, lambda: _made(kind), {})


@variants(CALLBACK, share=0.9)
def peft_trainer_lora(run: Run, settings: Any) -> None:
    """LoRA in ``Trainer(callbacks=[MemoryBudget(...)])``."""
    with_callback(run, _made, settings)


@situation(share=0.9, captures=2)
def peft_trainer_lora_last_batch(run: Run) -> None:
    with_callback(run, _made, LAST_BATCH, _Data(22))


@situation(share=0.9, captures=MOST_CAPTURES, seconds=600.0)
def peft_trainer_lora_lengths(run: Run) -> None:
    grouped(run, _made)


@situation(share=0.9, captures=2)
def peft_trainer_lora_resumed(run: Run) -> None:
    """The adapter is saved, and resumed on the same base."""
    resumed(run, _made)


@situation(share=0.95, captures=-1)
def peft_switched(run: Run) -> None:
    """Two adapters in turns: ``add_adapter``, ``set_adapter``, ``disable_adapter()``."""
    model = run.fit(_made().train())
    step = _step(run)
    for i in range(6):
        if i == 2:
            model.add_adapter("second", _lora(r=2))
        if i >= 2:
            model.set_adapter("second" if i % 2 == 0 else "default")
        model.zero_grad()
        with model.disable_adapter(), torch.no_grad():
            tokens = run.tokens(i, 8, 20, most=96)
            run.see(f"reference {i}", model(input_ids=tokens, labels=tokens).loss)
        with run.step():
            loss = step(model, i)
        run.see(f"loss {i}", loss)
        run.see_model(model, f"step {i}")


@situation(share=0.95, captures=-1)
def peft_merged_in_between(run: Run) -> None:
    """``merge_adapter`` for evaluation, ``unmerge_adapter`` to go on."""
    model = run.fit(_made().train())
    step = _step(run)
    for i in range(4):
        model.zero_grad()
        with run.step():
            loss = step(model, i)
        run.see(f"loss {i}", loss)
        run.see_model(model, f"step {i}")
        with torch.no_grad():
            for each in model.parameters():
                if each.grad is not None:
                    each -= 0.1 * each.grad
        model.merge_adapter()
        model.eval()
        with torch.no_grad():
            tokens = run.tokens(i, 8, 20, most=96)
            run.see(f"merged {i}", model(input_ids=tokens, labels=tokens).loss)
        model.train()
        model.unmerge_adapter()


@situation(share=0.95, captures=-1)
def peft_merged_for_good(run: Run) -> None:
    """``merge_and_unload`` of a fitted base, which trains on in full."""
    base = run.fit(tiny_gpt2())
    model = _made(base=base).train()
    step = _step(run)
    with run.step():
        run.see("loss", step(model, 0))
    whole = model.merge_and_unload()
    whole.requires_grad_(True)
    run.expect("the base is the model again", whole is base)
    for i in range(3):
        whole.zero_grad()
        with run.step():
            loss = step(whole, i)
        run.see(f"loss {i}", loss)
        run.see_model(whole, f"step {i}")


@situation(share=1.1, captures=-1)
def peft_input_gradients(run: Run) -> None:
    """``enable_input_require_grads`` and checkpoints, as recipes for LoRA do."""
    base = tiny_gpt2()
    base.enable_input_require_grads()
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    run.train(_made(base=base).train(), _step(run), optimizer=_adam)


@situation(share=0.95, captures=-1)
def peft_saved(run: Run) -> None:
    """``save_pretrained`` and ``load_adapter`` into a fitted model."""
    model = run.fit(_made().train())
    step = _step(run)
    for i in range(4):
        model.zero_grad()
        with run.step():
            loss = step(model, i)
        run.see(f"loss {i}", loss)
        run.see_model(model, f"step {i}")
        with torch.no_grad():
            for each in model.parameters():
                if each.grad is not None:
                    each -= 0.1 * each.grad
        if i == 1:
            model.save_pretrained("adapter")
        if i == 2:
            model.load_adapter("adapter", "default", is_trainable=True)


@variants({"lora": KINDS["lora"], "dora": KINDS["dora"]}, share=0.9)
def peft_llama_bf16(run: Run, kind: Any) -> None:
    """bf16 weights, adapters in float32."""
    config = kind()
    config.target_modules = {"q_proj", "v_proj", "down_proj"}
    model = peft.get_peft_model(tiny_llama().to(torch.bfloat16), config).train()
    run.train(model, _step(run), optimizer=_adam)

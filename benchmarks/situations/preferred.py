"""TRL's trainers with ``MemoryBudget``: supervised fine-tuning and preferences, with adapters and without."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import datasets
import peft
import tokenizers
import torch
import transformers as hf
import trl
import trl.trainer.utils

from situations.registry import situation, variants
from situations.run import Run
from situations.trainers import _trainer, tiny_gpt2

PRELOAD = (
    "accelerate",
    "peft",
    "datasets",
    "trl",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "tokenizers",
)
_TILE = 64
"""Columns of TRL's fused head, of which it takes 32,768 at a time: more than all else of a toy."""


@functools.cache
def tokenizer() -> Any:
    """Words ``w0`` to ``w92``, made here."""
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(93))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _drawn(count: int, length: int, seed: int) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed + 100 * count)).tolist()


def _supervised(lengths: tuple[int, ...] = (20,), count: int = 16) -> Any:
    return datasets.Dataset.from_dict({"input_ids": [_drawn(i, lengths[i % len(lengths)], 3) for i in range(count)]})


def _pairs(lengths: tuple[int, ...] = (8,), count: int = 16) -> Any:
    def words(i: int, length: int, seed: int) -> str:
        return "".join(f" w{token - 3}" for token in _drawn(i, length, seed))

    return datasets.Dataset.from_dict({
        "prompt": [words(i, 6, 5) for i in range(count)],
        "chosen": [words(i, lengths[i % len(lengths)], 6) for i in range(count)],
        "rejected": [words(i, lengths[(i + 1) % len(lengths)], 7) for i in range(count)],
    })  # fmt: skip


def _trained(run: Run, kind: Any, arguments: Any, model: Any, data: Any, **given: Any) -> None:
    trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = _TILE
    settings: dict[str, Any] = {
        "output_dir": "out", "report_to": [], "use_cpu": True, "per_device_train_batch_size": 4, "max_steps": 3,
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "seed": 0, "dataloader_pin_memory": False,
        "bf16": False, **arguments,
    }  # fmt: skip
    made = trl.SFTConfig if kind is trl.SFTTrainer else trl.DPOConfig
    callbacks = run.callbacks(model)

    beside = [given["ref_model"]] if "ref_model" in given else []  # on a CPU, what the model does not hold
    watched = _trainer(kind, run, told=True, beside=beside)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = watched(
            model=model,
            args=made(**settings),
            train_dataset=data,
            processing_class=tokenizer(),
            callbacks=callbacks,
            **given,
        )
        done.train()
    run.see_model(done.model)
    run.see(
        "logged",
        [
            {k: v for k, v in each.items() if "loss" in k or k in ("entropy", "grad_norm")}
            for each in done.state.log_history
        ],
    )


def _lora() -> Any:
    return peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn", "c_proj"], task_type="CAUSAL_LM")


SFT: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "clipped": {"max_grad_norm": 0.1},
    "smoothed": {"label_smoothing_factor": 0.1},
    "no_checkpoints": {"gradient_checkpointing": False},
    "dft": {"loss_type": "dft"},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1},
    "workers": {"dataloader_num_workers": 1},
}


@variants(SFT, share=0.97, captures=-1)
def sft(run: Run, settings: Any) -> None:
    evaluated = {"eval_dataset": _supervised(count=4)} if "eval_strategy" in settings else {}
    _trained(run, trl.SFTTrainer, settings, tiny_gpt2(n_positions=64), _supervised(), **evaluated)


@situation(share=0.97, captures=-1)
def sft_lengths(run: Run) -> None:
    _trained(run, trl.SFTTrainer, {"max_steps": 4}, tiny_gpt2(n_positions=64), _supervised((20, 12, 17), 14))


@variants(
    {"packed": {"packing": True, "max_length": 16}, "free": {"padding_free": True, "max_length": None}},
    share=0.97,
    captures=-1,
)
def sft_rows(run: Run, settings: Any) -> None:
    """Rows without padding: positions and lengths among the arguments."""
    _trained(run, trl.SFTTrainer, settings, tiny_gpt2(n_positions=64), _supervised((20, 12, 17)))


@variants(
    {"plain": {}, "bf16": {"bf16": True}, "accumulated": {"gradient_accumulation_steps": 2}}, share=0.97, captures=-1
)
def sft_lora(run: Run, settings: Any) -> None:
    _trained(run, trl.SFTTrainer, settings, peft.get_peft_model(tiny_gpt2(n_positions=64), _lora()), _supervised())


@variants(
    {
        "plain": {},
        "accumulated": {"gradient_accumulation_steps": 2},
        "bf16": {"bf16": True},
        "precomputed": {"precompute_ref_log_probs": True},
        "ipo": {"loss_type": "ipo"},
        "sft_too": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        "evaluated": {"eval_strategy": "steps", "eval_steps": 1},
    },
    share=1.0,
    captures=-1,
    over=(0,),
)
def dpo(run: Run, settings: Any) -> None:
    """With a reference model."""
    policy, reference = tiny_gpt2(n_positions=64), tiny_gpt2(n_positions=64)
    reference.load_state_dict(policy.state_dict())
    evaluated = {"eval_dataset": _pairs(count=4)} if "eval_strategy" in settings else {}
    _trained(run, trl.DPOTrainer, settings, policy, _pairs(), ref_model=reference, **evaluated)


@variants({"plain": {}, "lengths": {"max_steps": 4}}, share=1.0, captures=-1, over=(0, 1, 2, 3))
def dpo_lora(run: Run, settings: Any) -> None:
    """The reference is the model with its adapters disabled."""
    lengths = (8, 5, 11) if settings else (8,)
    model = peft.get_peft_model(tiny_gpt2(n_positions=64), _lora())
    _trained(run, trl.DPOTrainer, settings, model, _pairs(lengths))

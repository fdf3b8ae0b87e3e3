"""TRL's trainers with ``MemoryBudget``: supervised fine-tuning and preferences, with adapters and without."""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import datasets
import peft
import tokenizers
import torch
import transformers as hf
import trl
import trl.trainer.utils

from situations.registry import situation, variants
from situations.run import Run, seed_all
from situations.trainers import (
    BY_LENGTH,
    GROUPED_ROWS,
    LAST_BATCH,
    LENGTHS,
    MOST_CAPTURES,
    RESUMED,
    _trainer,
    expect_many_lengths,
    tiny_gpt2,
)

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
IN_ORDER = BY_LENGTH | {"train_sampling_strategy": "sequential"}
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


def _pairs(lengths: tuple[int, ...] = (8,), count: int = 16, rows: int = 1) -> Any:
    def words(i: int, length: int, seed: int) -> str:
        return "".join(f" w{token - 3}" for token in _drawn(i, length, seed))

    return datasets.Dataset.from_dict({
        "prompt": [words(i, 6, 5) for i in range(count)],
        "chosen": [words(i, lengths[i // rows % len(lengths)], 6) for i in range(count)],
        "rejected": [words(i, lengths[(i // rows + (rows == 1)) % len(lengths)], 7) for i in range(count)],
    })  # fmt: skip


def _trained(
    run: Run, kind: Any, arguments: Any, make: Callable[[], dict[str, Any]], data: Any, *, resume: bool = False
) -> list[int]:
    """Train what ``make`` makes; lengths of the batches."""
    trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = _TILE
    settings: dict[str, Any] = {
        "output_dir": "out", "report_to": [], "use_cpu": True, "per_device_train_batch_size": 4, "max_steps": 3,
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "seed": 0, "dataloader_pin_memory": False,
        "bf16": False, **arguments,
    }  # fmt: skip
    made = trl.SFTConfig if kind is trl.SFTTrainer else trl.DPOConfig
    given = make()
    callbacks = run.callbacks(given["model"])

    beside = [given["ref_model"]] if "ref_model" in given else []  # on a CPU, what the model does not hold
    watched = _trainer(kind, run, told=True, beside=beside)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = watched(
            args=made(**settings), train_dataset=data, processing_class=tokenizer(), callbacks=callbacks, **given
        )
        done.train(resume_from_checkpoint=resume)
    run.see_model(done.model)
    run.see(
        f"logged up to {done.state.global_step}",
        [
            {k: v for k, v in each.items() if "loss" in k or k in ("entropy", "grad_norm")}
            for each in done.state.log_history
        ],
    )
    return done.lengths


def _resumed(run: Run, kind: Any, make: Callable[[], dict[str, Any]], data: Any) -> None:
    """Saved, and resumed by another trainer."""
    shutil.rmtree("out", ignore_errors=True)  # what eager saved
    for resume, settings in enumerate(RESUMED):
        seed_all(1)
        _trained(run, kind, settings, make, data, resume=bool(resume))


def _lora() -> Any:
    return peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn", "c_proj"], task_type="CAUSAL_LM")


def _tuned() -> dict[str, Any]:
    return {"model": tiny_gpt2(n_positions=64)}


def _adapted() -> dict[str, Any]:
    return {"model": peft.get_peft_model(tiny_gpt2(n_positions=64), _lora())}


def _preferred() -> dict[str, Any]:
    """With a reference model."""
    policy, reference = tiny_gpt2(n_positions=64), tiny_gpt2(n_positions=64)
    reference.load_state_dict(policy.state_dict())
    return {"model": policy, "ref_model": reference}


def _evaluated(make: Callable[[], dict[str, Any]], settings: Any, data: Any) -> Callable[[], dict[str, Any]]:
    return (lambda: make() | {"eval_dataset": data(count=4)}) if "eval_strategy" in settings else make


CELLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "clipped": {"max_grad_norm": 0.1},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1},
    "workers": {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork"},
    "spawned": {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "spawn"},
}
SFT = CELLS | {"smoothed": {"label_smoothing_factor": 0.1}}


@variants(SFT | {"no_checkpoints": {"gradient_checkpointing": False}, "dft": {"loss_type": "dft"}}, share=0.97)
def sft(run: Run, settings: Any) -> None:
    _trained(run, trl.SFTTrainer, settings, _evaluated(_tuned, settings, _supervised), _supervised())


_MADE = {"sft": _tuned, "sft_lora": _adapted}


@variants(SFT, share=0.97)
def sft_lora(run: Run, settings: Any) -> None:
    _trained(run, trl.SFTTrainer, settings, _evaluated(_adapted, settings, _supervised), _supervised())


@variants(_MADE, share=0.97, captures=2)
def last_batch_of(run: Run, make: Any) -> None:
    """It is smaller."""
    _trained(run, trl.SFTTrainer, LAST_BATCH, make, _supervised(count=22))


@variants(_MADE, share=0.97, captures=MOST_CAPTURES, seconds=600.0)
def lengths_of(run: Run, make: Any) -> None:
    """``group_by_length``; the trainer pads."""
    data = _supervised(LENGTHS, GROUPED_ROWS)
    expect_many_lengths(run, _trained(run, trl.SFTTrainer, BY_LENGTH, make, data))


@variants(_MADE, share=0.97, captures=2)
def resumed_of(run: Run, make: Any) -> None:
    _resumed(run, trl.SFTTrainer, make, _supervised())


@variants(
    {"packed": {"packing": True, "max_length": 16}, "free": {"padding_free": True, "max_length": None}},
    share=0.97,
    captures=-1,
)
def sft_rows(run: Run, settings: Any) -> None:
    """Rows without padding: positions and lengths among the arguments."""
    _trained(run, trl.SFTTrainer, settings, _tuned, _supervised((20, 12, 17)))


@variants(
    CELLS
    | {
        "smoothed": {"label_smoothing": 0.1},
        "precomputed": {"precompute_ref_log_probs": True},
        "ipo": {"loss_type": "ipo"},
        "sft_too": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    },
    share=1.0,
)
def dpo(run: Run, settings: Any) -> None:
    """The reference runs between forward and backward: what it takes is planned for from the second step on."""
    _trained(run, trl.DPOTrainer, settings, _evaluated(_preferred, settings, _pairs), _pairs())


@situation(share=1.0, captures=2)
def dpo_last_batch(run: Run) -> None:
    """Two shapes, at whose first steps what the reference takes is not known yet."""
    _trained(run, trl.DPOTrainer, LAST_BATCH, _preferred, _pairs(count=22))


@situation(share=1.0, captures=MOST_CAPTURES, seconds=600.0)
def dpo_lengths(run: Run) -> None:
    data = _pairs(LENGTHS, 4 * len(LENGTHS), rows=4)
    expect_many_lengths(run, _trained(run, trl.DPOTrainer, IN_ORDER, _preferred, data))


@situation(share=1.0, captures=2)
def dpo_resumed(run: Run) -> None:
    _resumed(run, trl.DPOTrainer, _preferred, _pairs())


@variants({"plain": {}, "lengths": {"max_steps": 4}}, share=1.0, captures=-1, over=(0, 1, 2, 3))
def dpo_lora(run: Run, settings: Any) -> None:
    """The reference is the model with its adapters disabled."""
    _trained(run, trl.DPOTrainer, settings, _adapted, _pairs((8, 5, 11) if settings else (8,)))

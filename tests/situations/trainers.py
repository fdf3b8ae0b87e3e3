"""Trainers: Hugging Face's, and loops as Lightning and TRL have them."""

from __future__ import annotations

import shutil
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from ebbtide.engine.shared_calls import OWN_CAPTURES
from situations.parts import Chain
from situations.registry import Refusal, situation, variants
from situations.run import Run, seed_all

PRELOAD = ("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2")


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


_BY_NAME = Refusal("UsageError|CaptureError", "forward|compile|training_step|wrap")


LENGTHS = (24, 10, 19, 13, 16, 22, 7)
"""More than the shapes that have captures of their own."""
MOST_CAPTURES = OWN_CAPTURES + 2
"""Of many lengths: a batch without padding goes another way through a model, and each way has a symbolic one."""


class _Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens, of another length from four to four where ``lengths`` has several."""

    def __init__(self, length: int = 16, lengths: Sequence[int] = (24,)) -> None:
        self.tokens = torch.randint(96, (length, max(lengths)), generator=torch.Generator().manual_seed(3))
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index, : self.lengths[index // 4 % len(self.lengths)]]
        return {"input_ids": row, "labels": row}


def padded(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest row; what was put there is masked and has no label."""
    longest = max(len(row["input_ids"]) for row in rows)

    def batch(name: str, value: int) -> torch.Tensor:
        return torch.stack([F.pad(row[name], (0, longest - len(row[name])), value=value) for row in rows])

    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {"input_ids": batch("input_ids", 0), "labels": batch("labels", -100), "attention_mask": mask}


def expect_many_lengths(run: Run, lengths: Sequence[int]) -> None:
    """More than the shapes that have captures of their own, so that one is shared."""
    run.facts["lengths"] = len(set(lengths))
    run.expect("more lengths than have captures of their own", len(set(lengths)) > MOST_CAPTURES)


def tiny_gpt2(**settings: Any) -> Any:
    given = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 96, "use_cache": False}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**(given | settings)))


def _trainer(kind: type[Any], run: Run, *, told: bool = False, beside: Sequence[nn.Module] = ()) -> type[Any]:
    """Steps of the trainer as steps of the run: from the forward to the end of the backward.

    Args:
        kind: of trainer.
        run: of the situation.
        told: whether Ebbtide knows the optimizer, so that its state is of the budget.
        beside: models of the trainer that are not of the budget.
    """

    class Watched(kind):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            state = () if told or self.optimizer is None else self.optimizer.state.values()
            bytes_ = sum(v.nbytes for each in state for v in each.values() if isinstance(v, torch.Tensor))
            data = getattr(self.train_dataset, "tokens", None)  # of others it lies in no allocator of torch's
            self.lengths = [*getattr(self, "lengths", ()), args[1]["input_ids"].shape[1]]
            with run.step(beside, bytes_ + (data.nbytes if isinstance(data, torch.Tensor) else 0)):
                loss = super().training_step(*args, **kwargs)
            run.see(f"loss {len(run.peaks)}", loss)
            return loss

    return Watched


TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "clipped": {"max_grad_norm": 0.1, "lr_scheduler_type": "cosine"},
    "adafactor": {"optim": "adafactor"},
    "smoothed": {"label_smoothing_factor": 0.1},
    "averaged": {"average_tokens_across_devices": False},
}


def _arguments(**settings: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": "out", "report_to": [], "use_cpu": True, "per_device_train_batch_size": 4, "max_steps": 3,
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "seed": 0, "dataloader_pin_memory": False,
    }  # fmt: skip
    return hf.TrainingArguments(**(given | settings))


@variants(TRAINERS, share=1.1)
def trainer(run: Run, settings: Any) -> None:
    """Hugging Face's ``Trainer`` with a fitted model."""
    model = run.fit(tiny_gpt2())
    done = _trainer(hf.Trainer, run)(model=model, args=_arguments(**settings), train_dataset=_Data())
    done.train()
    run.see_model(model)


CALLBACK: dict[str, dict[str, Any]] = TRAINERS | {
    "checkpointed": {"activation_checkpointing": True},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1},
    "workers": {"dataloader_num_workers": 2},
    "spawned": {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "spawn"},
}


LAST_BATCH: dict[str, Any] = {"num_train_epochs": 2, "max_steps": -1}
"""Of 22 rows, two are left for it, twice."""
BY_LENGTH: dict[str, Any] = {"train_sampling_strategy": "group_by_length", "max_steps": 2 * len(LENGTHS)}
GROUPED_ROWS = 16 * len(LENGTHS)
"""The trainer sorts a quarter of them at a time."""
RESUMED = (
    {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"},
    {"max_steps": 7, "lr_scheduler_type": "constant"},
)
"""Of one trainer that saves, and of another that goes on from the fourth step."""


def with_callback(
    run: Run, make: Callable[[], Any], settings: Any, data: Any = None, collate: Any = None, *, resume: bool = False
) -> Any:
    """``Trainer(callbacks=[MemoryBudget(...)])`` of what ``make`` makes, trained."""
    model = make()
    done = _trainer(hf.Trainer, run, told=True)(
        model=model,
        args=_arguments(**settings),
        train_dataset=_Data() if data is None else data,
        eval_dataset=_Data(4),
        data_collator=collate,
        callbacks=run.callbacks(model),
    )
    done.train(resume_from_checkpoint=resume)
    run.see_model(model)
    return done


@variants(CALLBACK, share=0.95)
def trainer_callback(run: Run, settings: Any) -> None:
    """Fitted when training begins, the optimizer's state counted."""
    with_callback(run, tiny_gpt2, settings)


@situation(share=0.95, captures=2)
def trainer_callback_last_batch(run: Run) -> None:
    """It is smaller."""
    with_callback(run, tiny_gpt2, LAST_BATCH, _Data(22))


@situation(share=0.95, captures=MOST_CAPTURES, seconds=600.0)
def trainer_callback_lengths(run: Run) -> None:
    grouped(run, tiny_gpt2)


@situation(share=0.95, captures=2)
def trainer_callback_resumed(run: Run) -> None:
    """Saved, and resumed by another trainer with another model, each fitted."""
    resumed(run, tiny_gpt2)


def grouped(run: Run, make: Callable[[], Any]) -> None:
    """``group_by_length``, batches padded to their longest row."""
    data = _Data(GROUPED_ROWS, LENGTHS)
    expect_many_lengths(run, with_callback(run, make, BY_LENGTH, data, padded).lengths)


def resumed(run: Run, make: Callable[[], Any]) -> None:
    shutil.rmtree("out", ignore_errors=True)  # what eager saved
    for resume, settings in enumerate(RESUMED):
        seed_all(1)  # adapters are saved without their base, which is the same one
        done = with_callback(run, make, settings, resume=bool(resume))
        run.expect("all steps of both trainers", done.state.global_step == settings["max_steps"])
        run.see(f"trainer {resume}", [each for each in done.state.log_history if "loss" in each])
        del done


@situation(share=1.1, refused=_BY_NAME, either=True)
def trainer_compiles(run: Run) -> None:
    """``TrainingArguments(torch_compile=True)``."""
    model = run.fit(tiny_gpt2())
    arguments = _arguments(torch_compile=True, torch_compile_backend="eager")
    done = _trainer(hf.Trainer, run)(model=model, args=arguments, train_dataset=_Data())
    done.train()
    run.see_model(model)


@situation(share=1.2)
def trainer_checkpoints(run: Run) -> None:
    """``gradient_checkpointing=True``: the model's own checkpoints are inside of the step."""
    model = run.fit(tiny_gpt2())
    arguments = _arguments(gradient_checkpointing=True)
    done = _trainer(hf.Trainer, run)(model=model, args=arguments, train_dataset=_Data())
    done.train()
    run.see_model(model)


@situation(share=1.1, captures=-1)
def trainer_evaluates(run: Run) -> None:
    model = run.fit(tiny_gpt2())
    arguments = _arguments(eval_strategy="steps", eval_steps=1)
    done = _trainer(hf.Trainer, run)(model=model, args=arguments, train_dataset=_Data(), eval_dataset=_Data(4))
    done.train()
    run.see_model(model)


@situation(share=1.1, refused=_BY_NAME, either=True)
def trainer_patches_the_forward(run: Run) -> None:
    """TRL's ``SFTTrainer``: it puts a forward of its own on the model that keeps no logits."""

    def chunked(self: Any, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        hidden = self.transformer(input_ids).last_hidden_state
        logits = self.lm_head(hidden[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss}

    model = run.fit(tiny_gpt2())
    done = _trainer(hf.Trainer, run)(model=model, args=_arguments(), train_dataset=_Data())
    model.forward = types.MethodType(chunked, model)
    done.train()
    run.see_model(model)


@situation(share=1.1, refused=_BY_NAME, either=True)
def trainer_computes_the_loss(run: Run) -> None:
    """A subclass with ``compute_loss``: the loss is outside."""

    class Own(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return (loss, outputs) if return_outputs else loss

    model = run.fit(tiny_gpt2())
    done = _trainer(Own, run)(model=model, args=_arguments(), train_dataset=_Data())
    done.train()
    run.see_model(model)


class Lightning(nn.Module):
    """A module as Lightning has them: ``training_step`` does the work, ``forward`` is for inference."""

    def __init__(self, *, through_forward: bool) -> None:
        super().__init__()
        self.net, self.through_forward = Chain(loss=False), through_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        out = self(batch) if self.through_forward else self.net(batch)
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def _lightning_loop(run: Run, model: Any, call: Callable[[Any, int], torch.Tensor]) -> None:
    """What ``Trainer.fit`` does: a closure inside of ``optimizer.step``."""
    sgd = model.configure_optimizers()
    for i in range(4):
        x = run.x(i)

        def closure(i: int = i, x: torch.Tensor = x) -> torch.Tensor:
            sgd.zero_grad()
            with run.step():
                loss = call(x, i)
                loss.backward()
            return loss.detach()

        run.see(f"loss {i}", sgd.step(closure))
        run.see_model(model, f"step {i}")


@situation(refused=_BY_NAME, either=True, calls=4, share=0.9)
def lightning_module(run: Run) -> None:
    """A fitted ``LightningModule``: ``training_step`` is called, which never comes through ``forward``."""
    model = run.fit(Lightning(through_forward=False))
    _lightning_loop(run, model, model.training_step)


@situation(refused=_BY_NAME, either=True, calls=4, share=0.9)
def lightning_module_through_forward(run: Run) -> None:
    model = run.fit(Lightning(through_forward=True))
    _lightning_loop(run, model, model.training_step)


@situation(share=0.9)
def lightning_inner_net(run: Run) -> None:
    """What always works: the net inside is fitted."""
    model = Lightning(through_forward=False)
    run.fit(model.net)
    _lightning_loop(run, model, model.training_step)


@situation(refused=_BY_NAME, either=True, calls=4, captures=4, share=0.9)
def lightning_redirected(run: Run) -> None:
    """Lightning's strategy calls ``forward`` while that is replaced by ``training_step``, each time by a new function.

    So each call is captured, and the seventeenth refused; the callback of ``ebbtide.integrations.lightning`` fits what
    the strategy calls.
    """
    model = run.fit(Lightning(through_forward=False))

    def call(x: torch.Tensor, i: int) -> torch.Tensor:
        original = model.forward

        def redirected(*args: Any) -> Any:
            model.forward = original
            return model.training_step(*args)

        model.forward = redirected
        return model(x, i)

    try:
        _lightning_loop(run, model, call)
    finally:
        model.__dict__.pop("forward", None)

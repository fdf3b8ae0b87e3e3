"""accelerate: ``fit`` before and after ``prepare``, its loop, its hooks, its states on disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from torch.nn import functional as F

from situations.registry import Refusal, situation, variants
from situations.run import Run
from situations.trainers import LENGTHS, MOST_CAPTURES, _Data, expect_many_lengths, tiny_gpt2

PRELOAD = ("accelerate", "accelerate.hooks", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2")

ORDERS = {"fit_first": True, "prepare_first": False}
_DATA = _Data(16)


def _accelerator(**settings: Any) -> Accelerator:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return Accelerator(cpu=True, **settings)


def _loader(data: Any = _DATA, workers: int = 0, context: str | None = None, *, shuffle: bool = True) -> Any:
    return torch.utils.data.DataLoader(
        data,
        batch_size=4,
        shuffle=shuffle,
        generator=torch.Generator().manual_seed(5),
        num_workers=workers,
        multiprocessing_context=context,
    )


class _Loop:
    """What a script of accelerate's does, with everything that it may ask of the accelerator."""

    def __init__(self, run: Run, first: bool, loader: Any = None, **settings: Any) -> None:
        self.run, self.accelerator = run, _accelerator(**settings)
        loader = loader or _loader()
        self.data_bytes = loader.dataset.tokens.nbytes
        model = tiny_gpt2()
        self.adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if first:
            run.fit(model, optimizer=self.adam)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, self.adam, loader)
        if not first:
            run.fit(self.model, optimizer=self.adam)

    def train(
        self, epochs: int = 1, clip: float | None = None, smoothing: float = 0.0, *, evaluate: bool = False
    ) -> list[int]:
        """Lengths of the batches; a loss with ``smoothing`` is computed outside of the model."""
        run, accelerator, lengths = self.run, self.accelerator, list[int]()
        for epoch in range(epochs):
            for i, batch in enumerate(self.loader):
                lengths.append(batch["input_ids"].shape[1])
                with accelerator.accumulate(self.model):
                    with run.step(bytes_beside=self.data_bytes):
                        loss = self._smoothed(batch, smoothing) if smoothing else self.model(**batch).loss
                        accelerator.backward(loss)
                    run.see(f"loss {epoch} {i}", accelerator.gather(loss.detach()))
                    if clip is not None and accelerator.sync_gradients:
                        run.see(f"norm {epoch} {i}", accelerator.clip_grad_norm_(self.model.parameters(), clip))
                    del loss
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if evaluate:
                    run.see(f"evaluated {epoch} {i}", self._evaluated(batch))
        run.see_model(self.model)
        return lengths

    def _smoothed(self, batch: Any, smoothing: float) -> torch.Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), label_smoothing=smoothing)

    def _evaluated(self, batch: Any) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            loss = self.accelerator.gather_for_metrics(self.model(**batch).loss)
        self.model.train()
        return loss


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bf16": ({"mixed_precision": "bf16"}, {}),
    "accumulated": ({"gradient_accumulation_steps": 2}, {}),
    "accumulated_bf16": ({"gradient_accumulation_steps": 3, "mixed_precision": "bf16"}, {}),
    "clipped": ({}, {"clip": 0.1}),
    "evaluated": ({}, {"evaluate": True}),
    "smoothed": ({}, {"smoothing": 0.1}),
}
"""Settings of the accelerator and of the loop."""


def _both_orders(of: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}_{order}": (first, value) for name, value in of.items() for order, first in ORDERS.items()}


@variants(_both_orders(WAYS), share=0.95)
def accelerate_loop(run: Run, way: Any) -> None:
    first, (settings, loop) = way
    _Loop(run, first, **settings).train(2, **loop)


@variants(_both_orders({"fork": "fork", "spawn": "spawn"}), share=0.95)
def accelerate_workers(run: Run, way: Any) -> None:
    first, context = way
    _Loop(run, first, _loader(workers=1, context=context)).train()


@variants(ORDERS, share=0.95, captures=2)
def accelerate_last_batch(run: Run, first: Any) -> None:
    """It is smaller."""
    _Loop(run, first, _loader(_Data(22))).train(2)


@variants(ORDERS, share=0.95, captures=MOST_CAPTURES, seconds=600.0)
def accelerate_lengths(run: Run, first: Any) -> None:
    loop = _Loop(run, first, _loader(_Data(4 * len(LENGTHS), LENGTHS), shuffle=False))
    expect_many_lengths(run, loop.train(2))


@variants(ORDERS, share=0.95, captures=2)
def accelerate_resumed(run: Run, first: Any) -> None:
    """``save_state``, and another script that goes on from it."""
    shutil.rmtree("state", ignore_errors=True)  # what eager saved
    loop = _Loop(run, first)
    loop.train()
    loop.accelerator.save_state("state")
    del loop
    loop = _Loop(run, first)
    loop.accelerator.load_state("state")
    loop.train()


@variants(ORDERS, share=0.95, captures=-1)
def accelerate_saved(run: Run, first: Any) -> None:
    """``save_state``, more training, ``load_state``: the same training again."""
    loop = _Loop(run, first)
    loop.train()
    loop.accelerator.save_state("state")
    loop.train()
    loop.accelerator.load_state("state")
    loop.train()
    loop.accelerator.save_model(loop.model, "model")
    loop.accelerator.free_memory(loop.model)


@variants(_both_orders({"kept": True, "dropped": False}), share=0.95, captures=-1)
def accelerate_unwrapped(run: Run, way: Any) -> None:
    """``unwrap_model``, with and without the autocast that ``prepare`` put on, and training goes on."""
    first, keep = way
    loop = _Loop(run, first, mixed_precision="bf16")
    loop.train()
    inner = loop.accelerator.unwrap_model(loop.model, keep_fp32_wrapper=keep)
    run.expect("the same model", inner is loop.model)
    loop.train()


class _Doubling(ModelHook):
    """Changes what goes in and comes out."""

    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        output["loss"] = output["loss"] * self.factor
        return output


@variants(ORDERS, share=0.95, captures=-1)
def accelerate_hooked(run: Run, first: Any) -> None:
    """``add_hook_to_module`` before and after, another in its place, and off again."""
    model = tiny_gpt2()
    if first:
        run.fit(model)
        add_hook_to_module(model, _Doubling())
    else:
        add_hook_to_module(model, _Doubling())
        run.fit(model)
    for i in range(6):
        if i == 2:
            add_hook_to_module(model, _Doubling(3))
        if i == 4:
            remove_hook_from_module(model)
        model.zero_grad()
        tokens = run.tokens(i, 8, 20, most=96)
        with run.step():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")


@situation(share=1.2, refused=Refusal("CaptureError", "SequentialHook"))
def accelerate_hooks_in_a_row(run: Run) -> None:
    """accelerate keeps these out of every compilation."""
    model = run.fit(tiny_gpt2())
    add_hook_to_module(model, SequentialHook(_Doubling(), _Doubling()))
    _steps(run, model)


_MOVES = Refusal("UsageError", "behind the plan")


def _steps(run: Run, model: Any) -> None:
    for i in range(3):
        tokens = run.tokens(i, 8, 20, most=96)
        with run.step():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        run.see(f"loss {i}", loss)


OFFLOADS: dict[str, Any] = {
    "offloaded": lambda model: accelerate.cpu_offload(model, execution_device=torch.device("cpu")),
    "aligned": lambda model: accelerate.hooks.attach_align_device_hook(model, execution_device="cpu"),
    "offloaded_with_hook": lambda model: accelerate.cpu_offload_with_hook(model, execution_device="cpu"),
}


@variants(_both_orders(OFFLOADS), share=1.2, refused=_MOVES)
def accelerate_moves(run: Run, way: Any) -> None:
    """Hooks that move weights: refused in the first training call at the latest."""
    first, attach = way
    model = tiny_gpt2()
    if first:
        run.fit(model)
        attach(model)
    else:
        attach(model)
        run.fit(model)
    _steps(run, model)


@situation(share=1.2, refused=_MOVES)
def accelerate_moves_later(run: Run) -> None:
    """Hooks that align devices, put on a model that has trained."""
    model = run.fit(tiny_gpt2())
    _steps(run, model)
    accelerate.hooks.attach_align_device_hook(model, execution_device="cpu")
    _steps(run, model)


@variants(ORDERS, share=0.95, captures=-1, refused=Refusal("UsageError", "torch.compile"), either=True)
def accelerate_compiled(run: Run, first: Any) -> None:
    """``dynamo_backend``: planned where the model was fitted before, refused by name after."""
    _Loop(run, first, dynamo_backend="eager").train()


@situation(share=0.95)
def accelerate_two_models(run: Run) -> None:
    """Two models and optimizers of one accelerator, one of them fitted."""
    accelerator = _accelerator()
    one, other = run.fit(tiny_gpt2()), tiny_gpt2(n_layer=1)
    sgd = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other)]
    one, other, *sgd = accelerator.prepare(one, other, *sgd)
    for i in range(3):
        tokens = run.tokens(i, 8, 20, most=96)
        with run.step(beside=[other]):
            loss = one(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
        accelerator.backward(other(input_ids=tokens, labels=tokens).loss)
        run.see(f"loss {i}", loss)
        del loss
        for each in sgd:
            each.step()
            each.zero_grad()
        run.see_model(one, f"step {i}")
        run.see_model(other, f"other {i}")

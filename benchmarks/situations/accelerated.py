"""accelerate: ``fit`` before and after ``prepare``, its loop, its hooks, its states on disk."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module

from situations.registry import Refusal, situation, variants
from situations.run import Run
from situations.trainers import _Data, tiny_gpt2

PRELOAD = ("accelerate", "accelerate.hooks", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2")

ORDERS = {"fit_first": True, "prepare_first": False}
_DATA = _Data(22)  # the last batch is smaller


def _accelerator(**settings: Any) -> Accelerator:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return Accelerator(cpu=True, **settings)


def _loader(workers: int = 0, context: str | None = None) -> Any:
    return torch.utils.data.DataLoader(
        _DATA,
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(5),
        num_workers=workers,
        multiprocessing_context=context,
    )


class _Loop:
    """What a script of accelerate's does, with everything that it may ask of the accelerator."""

    def __init__(self, run: Run, first: bool, loader: Any = None, **settings: Any) -> None:
        self.run, self.accelerator = run, _accelerator(**settings)
        model = tiny_gpt2()
        self.adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if first:
            run.fit(model, optimizer=self.adam)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, self.adam, loader or _loader())
        if not first:
            run.fit(self.model, optimizer=self.adam)

    def train(self, epochs: int = 1, clip: float | None = 1.0) -> None:
        run, accelerator = self.run, self.accelerator
        for epoch in range(epochs):
            for i, batch in enumerate(self.loader):
                with accelerator.accumulate(self.model):
                    with run.step(bytes_beside=_DATA.tokens.nbytes):
                        loss = self.model(**batch).loss
                        accelerator.backward(loss)
                    run.see(f"loss {epoch} {i}", accelerator.gather(loss.detach()))
                    if clip is not None and accelerator.sync_gradients:
                        run.see(f"norm {epoch} {i}", accelerator.clip_grad_norm_(self.model.parameters(), clip))
                    del loss
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            with torch.no_grad():
                run.see(f"evaluated {epoch}", accelerator.gather_for_metrics(self.model(**batch).loss))
        run.see_model(self.model)


WAYS: dict[str, Any] = {
    f"{name}_{order}": (first, settings)
    for name, settings in {
        "plain": {},
        "bf16": {"mixed_precision": "bf16"},
        "accumulated": {"gradient_accumulation_steps": 2},
        "accumulated_bf16": {"gradient_accumulation_steps": 3, "mixed_precision": "bf16"},
    }.items()
    for order, first in ORDERS.items()
}


@variants(WAYS, share=0.95, captures=-1)
def accelerate_loop(run: Run, way: Any) -> None:
    first, settings = way
    _Loop(run, first, **settings).train(2)


@variants({"fork": "fork", "spawn": "spawn"}, share=0.95, captures=-1)
def accelerate_workers(run: Run, context: Any) -> None:
    _Loop(run, True, _loader(1, context)).train()


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


@variants(
    {
        f"{name}_{order}": (first, keep)
        for name, keep in {"kept": True, "dropped": False}.items()
        for order, first in ORDERS.items()
    },
    share=0.95,
    captures=-1,
)
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


@variants(
    {f"{name}_{order}": (first, way) for name, way in OFFLOADS.items() for order, first in ORDERS.items()},
    share=1.2,
    refused=_MOVES,
)
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

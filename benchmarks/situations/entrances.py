"""Every way into a model: nothing runs unplanned without a word."""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from situations.parts import Chain, TokenModel
from situations.registry import Refusal, situation, variants
from situations.run import Run

PRELOAD = ("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2")


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


_BY_NAME = Refusal("UsageError|CaptureError", "forward|compile|training_step|wrap")


# -- instance forwards ----------------------------------------------------------------------------------------------


def _method(model: Any) -> None:
    model.forward = types.MethodType(type(model).forward, model)


def _wrapping(model: Any) -> None:
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) * 2

    model.forward = forward


def _foreign(model: Any) -> None:
    model.forward = lambda x: model.features(x).abs().mean()


def _hooked(model: Any) -> None:
    add_hook_to_module(model, ModelHook())


def _casting(model: Any) -> None:
    """What ``Accelerator.prepare_model`` does under mixed precision."""
    model._original_forward = model.forward
    inner = model.forward.__func__
    cast = torch.autocast("cpu", torch.bfloat16)(inner)
    model.forward = types.MethodType(cast, model)


PATCHES = {"method": _method, "wrapping": _wrapping, "foreign": _foreign, "hook": _hooked, "autocast": _casting}


@variants(PATCHES, refused=_BY_NAME, either=True, share=0.9)
def forward_of_the_instance(run: Run, patch: Any) -> None:
    """A ``forward`` in the instance's dictionary, there before ``fit``."""
    model = Chain()
    patch(model)
    run.train(model, lambda m, i: _loss(m, run.x(i)))


@variants(PATCHES, refused=_BY_NAME, either=True, share=0.9, captures=-1)
def forward_patched_late(run: Run, patch: Any) -> None:
    """The same, put there after two steps; a hook of accelerate's, say, or ``Accelerator.prepare`` after ``fit``."""
    model = run.fit(Chain())
    for i in range(5):
        if i == 2:
            patch(model)
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")


@variants({"part_method": _method, "part_wrapping": _wrapping, "part_hook": _hooked}, share=0.9)
def forward_of_a_part(run: Run, patch: Any) -> None:
    """A submodule's own ``forward``: part of the step."""
    model = Chain()
    patch(model.layers[2])
    run.train(model, lambda m, i: _loss(m, run.x(i)))


@variants({"plain": "no", "bf16": "bf16"}, share=0.95, refused=_BY_NAME, either=True)
def accelerator(run: Run, precision: Any) -> None:
    """``fit``, then ``Accelerator.prepare``."""
    model = run.fit(Chain())
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    made = Accelerator(cpu=True, mixed_precision=precision)
    prepared, prepared_sgd = made.prepare(model, sgd)
    for i in range(4):
        prepared_sgd.zero_grad()
        x = run.x(i)
        with run.step():
            loss = prepared(x)
            made.backward(loss)
        made.clip_grad_norm_(prepared.parameters(), 1.0)
        prepared_sgd.step()
        del loss
        run.see_model(model, f"step {i}")


@variants({"plain": "no", "bf16": "bf16"}, share=0.95, refused=_BY_NAME, either=True)
def accelerator_first(run: Run, precision: Any) -> None:
    """``Accelerator.prepare``, then ``fit``."""
    model = Chain()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    made = Accelerator(cpu=True, mixed_precision=precision)
    prepared, prepared_sgd = made.prepare(model, sgd)
    run.fit(prepared)
    for i in range(4):
        prepared_sgd.zero_grad()
        x = run.x(i)
        with run.step():
            loss = prepared(x)
            made.backward(loss)
        prepared_sgd.step()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.95, refused=_BY_NAME, either=True)
def accelerator_accumulates(run: Run) -> None:
    model = run.fit(Chain())
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    made = Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, prepared_sgd = made.prepare(model, sgd)
    for i in range(6):
        x = run.x(i)
        with run.step(), made.accumulate(prepared):
            loss = prepared(x)
            made.backward(loss)
        del loss
        prepared_sgd.step()
        prepared_sgd.zero_grad()
        run.see_model(model, f"step {i}")


# -- compiled -------------------------------------------------------------------------------------------------------


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.first = inner, nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x)) * 2


@variants({"eager": "eager", "aot": "aot_eager"}, refused=_BY_NAME, either=True, share=0.9)
def compiled_afterwards(run: Run, backend: Any) -> None:
    """``torch.compile(fitted)``."""
    model = run.fit(Chain())
    compiled = torch.compile(model, backend=backend)
    for i in range(3):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = compiled(x)
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")


@variants({"before": True, "after": False}, refused=_BY_NAME, either=True, share=0.9)
def compiled_in_place(run: Run, before: Any) -> None:
    """``model.compile()`` before or after ``fit``."""
    model = Chain()
    if before:
        model.compile(backend="aot_eager")
    run.fit(model)
    if not before:
        model.compile(backend="aot_eager")
    for i in range(3):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")


@situation(refused=_BY_NAME, either=True, share=0.9)
def compiled_around(run: Run) -> None:
    """A fitted module inside of one that is compiled."""
    outer = Around(Chain())
    run.fit(outer.inner)
    compiled = torch.compile(outer, backend="aot_eager")
    for i in range(3):
        outer.zero_grad()
        x = run.x(i)
        with run.step(beside=[outer.first]):
            loss = compiled(x)
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(outer, f"step {i}")


@situation(refused=_BY_NAME, either=True, share=0.9)
def compiled_part(run: Run) -> None:
    """A submodule that was compiled in place, below a fitted one."""
    model = Chain()
    model.layers[2].compile(backend="aot_eager")
    run.train(model, lambda m, i: _loss(m, run.x(i)), steps=3)


@situation(refused=_BY_NAME, either=True, share=0.9)
def compiled_function_around(run: Run) -> None:
    """``torch.compile`` of a whole training step."""
    model = run.fit(Chain())

    @torch.compile(backend="eager")
    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x) * 2

    for i in range(3):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = forward(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def compiled_elsewhere(run: Run) -> None:
    """Unrelated code is compiled between steps."""
    double = torch.compile(lambda x: (x * 2).sum(), backend="aot_eager")

    def step(model: Any, i: int) -> Any:
        loss = _loss(model, run.x(i))
        return loss, double(run.x(i, 4 + i, 4))

    run.train(Chain(), step)


# -- threads --------------------------------------------------------------------------------------------------------


@situation(share=1.1, seconds=120.0)
def compiling_in_another_thread(run: Run) -> None:
    """Another thread compiles all the time: ``is_compiling()`` is global to the process, this model's steps are not."""
    model, stop, failed = run.fit(Chain(16, 3)), threading.Event(), []

    def compile_() -> None:
        try:
            while not stop.is_set():
                torch._dynamo.reset_code_caches()
                torch.compile(lambda x: (x * 3 + 1).sin().sum(), backend="eager")(torch.ones(7))
        except Exception as error:
            failed.append(repr(error)[:200])

    thread = threading.Thread(target=compile_)
    if not run.eager:
        thread.start()
    try:
        for i in range(150):
            model.zero_grad()
            loss = model(run.x(i, 32, 16))
            loss.backward()
            run.see(f"loss {i}", loss)
            del loss
    finally:
        stop.set()
        if not run.eager:
            thread.join()
    run.expect(f"the other thread's compilation fails: {failed[:1]}", not failed)
    run.see_model(model)


@situation(share=1.1)
def compiling_while_a_thread_trains(run: Run) -> None:
    """The other way round: the fitted model trains in a thread, the main thread compiles."""
    model, failed = run.fit(Chain(16, 3)), []

    def train() -> None:
        try:
            for i in range(100):
                model.zero_grad()
                model(run.x(i, 32, 16)).backward()
        except Exception as error:
            failed.append(repr(error)[:200])

    thread = threading.Thread(target=train)
    thread.start()
    compiled = 0
    try:
        while thread.is_alive():
            if run.eager:
                thread.join()
                break
            torch.compile(lambda x: (x * 3 + 1).sin().sum(), backend="eager")(torch.ones(7))
            compiled += 1
    except Exception as error:
        run.expect(f"a compilation in the main thread fails: {repr(error)[:200]}", False)
    thread.join()
    run.expect(f"training fails: {failed[:1]}", not failed)
    run.see_model(model)


@situation(share=0.9)
def trained_in_a_thread(run: Run) -> None:
    def work() -> None:
        run.train(Chain(), lambda m, i: _loss(m, run.x(i)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@situation(share=0.9)
def backward_in_another_thread(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return loss.detach()

    run.train(Chain(p=0.1), step)


@variants({"own_models": True, "one_model": False}, share=2.5, captures=-1)
def threads_train(run: Run, own: Any) -> None:
    """Three threads at a time: a model each, or one model whose gradients are asked for."""
    first = Chain()
    models = [run.fit(copy.deepcopy(first)) for _ in range(3)] if own else [run.fit(first)] * 3
    found: dict[str, Any] = {}
    failed: list[str] = []

    def work(k: int) -> None:
        try:
            for i in range(8):
                loss = models[k](run.x(10 * k + i, 128 + 16 * (i % 2), 64))
                found[f"{k} {i}"] = torch.autograd.grad(loss, list(models[k].parameters()))
        except Exception as error:
            failed.append(repr(error)[:200])

    with run.step():
        if own:
            for k in range(3):
                models[k](run.x(0, 128, 64)).backward()
        else:
            models[0](run.x(0, 128, 64)).backward()
    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.expect(f"a thread fails: {failed[:1]}", not failed)
    for name in sorted(found):
        run.see(name, found[name])


# -- trainers -------------------------------------------------------------------------------------------------------


class _Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, length: int = 16, width: int = 24) -> None:
        self.tokens = torch.randint(96, (length, width), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def tiny_gpt2(**settings: Any) -> Any:
    given = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 96, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**(given | settings)))


def _trainer(kind: type[Any], run: Run) -> type[Any]:
    """Steps of the trainer as steps of the run: from the forward to the end of the backward."""

    class Watched(kind):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            state = self.optimizer.state.values() if self.optimizer is not None else ()
            bytes_ = sum(v.nbytes for each in state for v in each.values() if isinstance(v, torch.Tensor))
            data = self.train_dataset.tokens.nbytes
            with run.step(bytes_beside=bytes_ + data):
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
    return TrainingArguments(
        output_dir="out", report_to=[], use_cpu=True, per_device_train_batch_size=4, max_steps=3, save_strategy="no",
        logging_steps=1, disable_tqdm=True, seed=0, dataloader_pin_memory=False, **settings,
    )  # fmt: skip


@variants(TRAINERS, share=1.1)
def trainer(run: Run, settings: Any) -> None:
    """Hugging Face's ``Trainer`` with a fitted model."""
    model = run.fit(tiny_gpt2())
    done = _trainer(Trainer, run)(model=model, args=_arguments(**settings), train_dataset=_Data())
    done.train()
    run.see_model(model)


@situation(share=1.1, refused=_BY_NAME, either=True)
def trainer_compiles(run: Run) -> None:
    """``TrainingArguments(torch_compile=True)``."""
    model = run.fit(tiny_gpt2())
    arguments = _arguments(torch_compile=True, torch_compile_backend="eager")
    done = _trainer(Trainer, run)(model=model, args=arguments, train_dataset=_Data())
    done.train()
    run.see_model(model)


@situation(share=1.2)
def trainer_checkpoints(run: Run) -> None:
    """``gradient_checkpointing=True``: the model's own checkpoints are inside of the step."""
    model = run.fit(tiny_gpt2())
    arguments = _arguments(gradient_checkpointing=True)
    done = _trainer(Trainer, run)(model=model, args=arguments, train_dataset=_Data())
    done.train()
    run.see_model(model)


@situation(share=1.1, captures=-1)
def trainer_evaluates(run: Run) -> None:
    model = run.fit(tiny_gpt2())
    arguments = _arguments(eval_strategy="steps", eval_steps=1)
    done = _trainer(Trainer, run)(model=model, args=arguments, train_dataset=_Data(), eval_dataset=_Data(4))
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
    done = _trainer(Trainer, run)(model=model, args=_arguments(), train_dataset=_Data())
    model.forward = types.MethodType(chunked, model)
    done.train()
    run.see_model(model)


@situation(share=1.1, refused=_BY_NAME, either=True)
def trainer_computes_the_loss(run: Run) -> None:
    """A subclass with ``compute_loss``: the loss is outside."""

    class Own(Trainer):
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


@situation(refused=_BY_NAME, either=True, calls=4, share=0.9)
def lightning_redirected(run: Run) -> None:
    """Lightning's strategy calls ``forward`` while that is replaced by ``training_step``."""
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


# -- other doors ----------------------------------------------------------------------------------------------------


@situation(calls=4)
def forward_called_by_name(run: Run) -> None:
    """``model.forward(x)``."""
    run.train(Chain(), lambda m, i: _loss(m.forward, run.x(i)))


@situation(calls=4)
def forward_of_the_class(run: Run) -> None:
    """``type(model).forward(model, x)``."""
    run.train(Chain(), lambda m, i: _loss(lambda x: type(m).forward(m, x), run.x(i)))


@situation()
def called_with_keywords(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        loss = model(labels=run.tokens(i), tokens=run.tokens(i))
        loss.backward()
        return loss.detach()

    run.train(TokenModel(p=0.1), step)


@situation()
def inside_sequential(run: Run) -> None:
    """A fitted part of an ordinary model."""
    head, net = nn.Linear(64, 10), Chain(loss=False)
    whole = nn.Sequential(net, head)
    run.fit(net)
    for i in range(4):
        whole.zero_grad()
        x = run.x(i)
        with run.step(beside=[head]):
            loss = whole(x).square().mean()
            loss.backward()
        del loss
        run.see_model(whole, f"step {i}")


@situation(captures=-1, calls=-1, share=1.2)
def fitted_inside_fitted(run: Run) -> None:
    """The outer one's plan is the one that runs."""
    outer = Around(Chain(p=0.1))
    run.fit(outer.inner)
    run.train(outer, lambda m, i: _loss(m, run.x(i)))


@situation(share=1.2, refused=_BY_NAME, either=True)
def functional_call(run: Run) -> None:
    """``torch.func.functional_call`` with other parameters, as meta-learning does."""
    model = run.fit(Chain())
    for i in range(4):
        weights = {name: (p.detach() * 0.9).requires_grad_() for name, p in model.named_parameters()}
        extra = sum(w.nbytes for w in weights.values())
        x = run.x(i)
        with run.step(bytes_beside=extra):
            loss = torch.func.functional_call(model, weights, (x,))
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        for name, weight in weights.items():
            run.see(f"{i} {name}", weight.grad)


@situation(refused=Refusal("UsageError|CaptureError|RuntimeError", "transform|func|vmap|grad"), either=True, calls=-1, captures=-1)
def functional_gradient(run: Run) -> None:
    """``torch.func.grad`` over a fitted module."""
    model = run.fit(Chain())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    x = run.x(0)
    found = torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)))(weights)
    run.see("gradients", found)


@situation(refused=Refusal("UsageError|CaptureError|RuntimeError", "create_graph|double|twice|derivative"), captures=-1, calls=-1)
def double_backward(run: Run) -> None:
    """``create_graph=True``: a gradient penalty needs the backward's own graph, which no plan has."""
    model = run.fit(Chain())
    x = run.x(0).requires_grad_()
    (first,) = torch.autograd.grad(model(x), x, create_graph=True)
    first.square().sum().backward()


@situation(refused=Refusal("UsageError", "DataParallel|device_ids|replica|wrap"), either=True, calls=-1)
def data_parallel(run: Run) -> None:
    """On a CPU, ``DataParallel`` calls its module and no replica."""
    model = nn.DataParallel(Chain())
    run.train(model, lambda m, i: _loss(m, run.x(i)), steps=3)


@situation(refused=Refusal("UsageError|CaptureError", "DistributedDataParallel|wrap"), either=True, captures=-1, calls=-1)
def distributed(run: Run) -> None:
    """``DistributedDataParallel`` of one process around a fitted model."""
    import torch.distributed as distributed_

    if not distributed_.is_initialized():
        distributed_.init_process_group("gloo", store=distributed_.HashStore(), rank=0, world_size=1)
    model = run.fit(Chain(), 2.0)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for i in range(4):
        model.zero_grad()
        loss = wrapped(run.x(i))
        loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@variants({"reentrant": True, "other": False}, share=1.3, captures=-1, calls=-1)
def checkpoint_around(run: Run, reentrant: Any) -> None:
    """A fitted module under somebody's checkpoint."""

    def step(model: Any, i: int) -> Any:
        x = run.x(i).requires_grad_()
        loss = checkpoint(model, x, use_reentrant=reentrant)
        loss.backward()
        return loss.detach(), x.grad

    run.train(Chain(p=0.1), step)

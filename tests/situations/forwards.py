"""Ways into a model past its class's forward, and around it."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from situations.parts import Around, Chain, TokenModel
from situations.registry import Refusal, situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


_BY_NAME = Refusal("UsageError|CaptureError", "forward|compile|training_step|wrap")


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
    from accelerate.hooks import ModelHook, add_hook_to_module

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


def _accelerator(**settings: Any) -> Any:
    from accelerate import Accelerator  # takes seconds, and not every process needs it

    return Accelerator(**settings)


@variants({"plain": "no", "bf16": "bf16"}, share=0.95, refused=_BY_NAME, either=True)
def accelerator(run: Run, precision: Any) -> None:
    """``fit``, then ``Accelerator.prepare``."""
    model = run.fit(Chain())
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    made = _accelerator(cpu=True, mixed_precision=precision)
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
    made = _accelerator(cpu=True, mixed_precision=precision)
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
    made = _accelerator(cpu=True, gradient_accumulation_steps=2)
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


@situation(
    refused=Refusal("UsageError|CaptureError|RuntimeError", "transform|func|vmap|grad"),
    either=True,
    calls=-1,
    captures=-1,
)
def functional_gradient(run: Run) -> None:
    """``torch.func.grad`` over a fitted module."""
    model = run.fit(Chain())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    x = run.x(0)
    found = torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)))(weights)
    run.see("gradients", found)


@situation(
    refused=Refusal("UsageError|CaptureError|RuntimeError", "create_graph|double|twice|derivative"),
    captures=-1,
    calls=-1,
)
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


@situation(
    refused=Refusal("UsageError|CaptureError", "DistributedDataParallel|wrap"), either=True, captures=-1, calls=-1
)
def distributed(run: Run) -> None:
    """``DistributedDataParallel`` of one process around a fitted model."""
    import torch.distributed as distributed_

    if not distributed_.is_initialized():
        distributed_.init_process_group("gloo", store=distributed_.HashStore(), rank=0, world_size=1)
    model = run.fit(Chain(), "16MiB")
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

"""States of optimizers, known to ``fit`` and not."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from torch import nn

from situations.parts import Chain
from situations.registry import situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


def _hugging_adafactor(parameters: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "adafactor_hugging": lambda p: _hugging_adafactor(p),
    "groups": lambda p: _groups(list(p)),
}


def _groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    halves = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "lr": 1e-4}]
    return torch.optim.AdamW(halves, lr=1e-3)


@variants(OPTIMIZERS)
def optimizer(run: Run, make: Any) -> None:
    """``optimizer=``: what its state takes is planned for from the first step on, and trying it out takes nothing."""
    run.train(Chain(192, 6), lambda m, i: _loss(m, run.x(i, 768, 192)), steps=4, optimizer=make)


@variants({name: OPTIMIZERS[name] for name in ("adamw", "adamw_fused", "momentum", "adafactor")}, share=1.03)
def heavy_optimizer(run: Run, make: Any) -> None:
    """Parameters and state are nearly all of it."""
    run.train(Chain(512, 4), lambda m, i: _loss(m, run.x(i, 64, 512)), steps=4, optimizer=make)


@situation()
def optimizer_not_told_of(run: Run) -> None:
    """Without ``optimizer=`` its state does not count, so it is left out here as well."""
    model = run.fit(Chain())
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i in range(4):
        model.zero_grad()
        x = run.x(i)
        state = sum(v.nbytes for each in adam.state.values() for v in each.values() if isinstance(v, torch.Tensor))
        with run.step(bytes_beside=state):
            model(x).backward()
        adam.step()
        run.see_model(model, f"step {i}")


@situation()
def optimizer_of_two_models(run: Run) -> None:
    """One optimizer, two modules, one of which is fitted: the other's state is resident as well."""
    model, head = Chain(128, 6), nn.Linear(128, 128)
    adam = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    run.fit(model, optimizer=adam)
    for i in range(4):
        adam.zero_grad()
        x = run.x(i, 512, 128)
        with run.step(beside=[head], bytes_beside=x.nbytes):
            h = head(x)
            loss = model(h)
            del h
            loss.backward()
        adam.step()
        run.see_model(model, f"step {i}")
        run.see_model(head, f"head {i}")
        del loss


@situation()
def optimizer_state_loaded(run: Run) -> None:
    """A state that was saved comes back before the first step: it is there, and counts once."""
    model = Chain(192, 6)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    adam.zero_grad()
    run.fit(model, optimizer=adam)
    for i in range(3):
        x = run.x(i, 768, 192)
        with run.step():
            loss = model(x)
            loss.backward()
        adam.step()
        adam.zero_grad()
    run.see_model(model)


def _within(run: Run, model: Any, adam: torch.optim.Optimizer, i: int, micro: int = 1) -> None:
    """One iteration, the optimizer's step with it: all of it is of the budget."""
    x = run.x(i, 1024, 256)
    with run.step():
        for _ in range(micro):
            loss = model(x)
            loss.backward()
            del loss
        adam.step()
        adam.zero_grad()
    run.see_model(model, f"step {i}")


@variants({name: each for name, each in OPTIMIZERS.items() if name not in ("sgd", "adafactor_hugging")}, share=0.8)
def offloaded(run: Run, make: Any) -> None:
    """``offload_optimizer=True``: the state is on the disk in the step, and the budget is of the whole iteration."""
    model = Chain(256, 6)
    adam = make(model.parameters())
    with tempfile.TemporaryDirectory(dir=".") as directory:
        run.fit(model, optimizer=adam, tiers=f"disk:{directory}", offload_optimizer=True)
        for i in range(4):
            _within(run, model, adam, i)
        run.see("state", adam.state_dict()["state"])


@variants({"accumulated": 3}, share=0.8)
def offloaded_loop(run: Run, micro: int) -> None:
    """It stays away over several backwards."""
    model = Chain(256, 6)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory(dir=".") as directory:
        run.fit(model, optimizer=adam, tiers=f"disk:{directory}", offload_optimizer=True)
        for i in range(4):
            _within(run, model, adam, i, micro)
        run.see("state", adam.state_dict()["state"])


@situation(share=0.8)
def offloaded_and_read(run: Run) -> None:
    """Checkpoints of the state are taken after the backward, and loaded again."""
    model = Chain(256, 6)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory(dir=".") as directory:
        run.fit(model, optimizer=adam, tiers=f"disk:{directory}", offload_optimizer=True)
        for i in range(4):
            _within(run, model, adam, i)
            kept = copy.deepcopy(adam.state_dict())
            x = run.x(i, 1024, 256)
            model(x).backward()
            run.see(f"state {i}", adam.state_dict()["state"])
            adam.load_state_dict(kept)
            adam.zero_grad()
            del kept, x

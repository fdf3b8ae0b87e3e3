"""A user asks for what a refusal names: it is accepted at the next call, and every step stays within it.

What a loop does besides calling the model is learned where it does it, so a refusal may come once more then. It names a
budget that is accepted at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ebbtide
from ebbtide.errors import BudgetError
from situations.parts import Chain
from situations.registry import situation
from situations.run import Run

STEPS = 5


def _asked(
    run: Run, body: Callable[[Any, torch.Tensor], Any], refusals: int, *, told: bool = False, loss: bool = True
) -> None:
    """Train within a budget that is far too small at first, and then within what refusals name, so many of them."""
    model = Chain(loss=loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if told else None
    run.fit(model, "1KiB", **({"optimizer": optimizer} if told else {}))
    refused = 0
    for i in range(STEPS):
        while True:
            x = run.x(i)
            run.inputs.clear()
            try:
                with run.step():
                    seen = body(model, x)
                break
            except BudgetError as error:
                refused += 1
                run.expect(f"no more than {refusals} refusals", refused <= refusals)
                ebbtide.set_budget(model, error.smallest_bytes)
                model.zero_grad()  # of what the step has done so far
        run.see(f"step {i}", seen)
        run.see_model(model, f"step {i}")
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
    run.facts["refusals"] = refused


def _step(model: Any, x: torch.Tensor) -> Any:
    loss = model(x)
    loss.backward()
    return loss.detach()


@situation(captures=-1)
def smallest_named_plain(run: Run) -> None:
    _asked(run, _step, 1)


@situation(captures=-1)
def smallest_named_optimizer(run: Run) -> None:
    _asked(run, _step, 1, told=True)


@situation(over=(0,), captures=-1)
def smallest_named_two_forwards(run: Run) -> None:
    def both(model: Any, x: torch.Tensor) -> Any:
        loss = model(x) + model(x)
        loss.backward()
        return loss.detach()

    _asked(run, both, 2)


@situation(over=(0,), captures=-1)
def smallest_named_retained(run: Run) -> None:
    def twice(model: Any, x: torch.Tensor) -> Any:
        loss = model(x)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    _asked(run, twice, 2)


@situation(over=(0,), captures=-1)
def smallest_named_loss_outside(run: Run) -> None:
    def outside(model: Any, x: torch.Tensor) -> Any:
        loss = model(x).softmax(-1).square().mean()
        loss.backward()
        return loss.detach()

    _asked(run, outside, 2, loss=False)


@situation(captures=-1, calls=-1)
def smallest_named_accumulated(run: Run) -> None:
    def accumulated(model: Any, x: torch.Tensor) -> Any:
        return torch.stack([_step(model, x) for _ in range(2)])

    _asked(run, accumulated, 2)

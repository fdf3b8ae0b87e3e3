"""Hooks that come late, and whatever else changes on a model after its first call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from situations.parts import Chain
from situations.registry import Refusal, situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


def _late(run: Run, put: Any, *, off: bool = False, steps: int = 6) -> None:
    """``put`` hooks on after the second step and, with ``off``, takes them off after the fourth."""
    model, handles = run.fit(Chain()), []
    for i in range(steps):
        if i == 2:
            handles = put(model)
        if i == 4 and off:
            for handle in handles:
                handle.remove()
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")


HOOKS = {
    "forward": lambda m: [m.layers[2].register_forward_hook(lambda mod, args, out: out * 2)],
    "forward_pre": lambda m: [m.layers[2].register_forward_pre_hook(lambda mod, args: (args[0] * 2,))],
    "forward_kwargs": lambda m: [
        m.layers[2].register_forward_pre_hook(lambda mod, args, kw: ((args[0] + 1,), kw), with_kwargs=True)
    ],
    "on_every_layer": lambda m: [each.register_forward_hook(lambda mod, args, out: out + 1) for each in m.layers],
    "on_the_list": lambda m: [m.layers[-1].register_forward_hook(lambda mod, args, out: out.clamp(min=0))],
}


@variants({**HOOKS, "on_the_model": lambda m: [m.register_forward_hook(lambda mod, args, out: out * 2)]}, captures=-1)
def hook_late(run: Run, put: Any) -> None:
    """A forward hook or pre-hook that is put on after the first call changes loss and gradients."""
    _late(run, put)


@variants({name: HOOKS[name] for name in ("forward", "forward_pre")}, captures=-1)
def hook_late_and_off(run: Run, put: Any) -> None:
    _late(run, put, off=True)


BACKWARD = {
    "full": lambda m: [m.layers[2].register_full_backward_hook(lambda mod, gin, gout: (gin[0] * 2,))],
    "full_pre": lambda m: [m.layers[2].register_full_backward_pre_hook(lambda mod, gout: (gout[0] * 2,))],
    "full_everywhere": lambda m: [
        each.register_full_backward_hook(lambda mod, gin, gout: (gin[0] * 2,)) for each in m.layers[1:]
    ],
}


@variants(BACKWARD, captures=-1, refused=Refusal("CaptureError", "hook"), either=True)
def backward_hook_late(run: Run, put: Any) -> None:
    """A backward hook on a submodule runs, or is refused by name; it is never ignored."""
    _late(run, put)


@variants(BACKWARD, captures=-1, refused=Refusal("CaptureError", "hook"), either=True)
def backward_hook_first(run: Run, put: Any) -> None:
    model = Chain()
    put(model)
    run.train(model, lambda m, i: _loss(m, run.x(i)))


@variants(
    {
        "parameter": lambda m: [m.layers[2].weight.register_hook(lambda grad: grad * 2)],
        "accumulated": lambda m: [
            m.layers[2].weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(2), None)[1])
        ],
        "model_backward": lambda m: [m.register_full_backward_hook(lambda mod, gin, gout: None)],
    },
    captures=-1,
)
def hook_outside_late(run: Run, put: Any) -> None:
    """Hooks on parameters and on the model itself run outside of the captured step."""
    _late(run, put)


def _noisy(note: list[str]) -> Any:
    def put(m: Any) -> list[Any]:
        def hook(name: str) -> Any:
            return lambda grad: (note.append(name), grad + torch.randn_like(grad) * 0.01)[1]

        return [p.register_hook(hook(name)) for name, p in m.named_parameters()]

    return put


@situation(captures=-1)
def hooks_that_draw(run: Run) -> None:
    """Noise on gradients, as in private training: which parameter gets which draw is the order of the hooks."""
    order: list[str] = []
    _late(run, _noisy(order))
    run.see("order", order)


@situation(captures=-1)
def accumulated_hooks_that_share(run: Run) -> None:
    """A budget of norm that all gradients share, first come, first served."""

    def put(m: Any) -> list[Any]:
        left = [1.0]

        def hook(p: Any) -> None:
            norm = float(p.grad.norm())
            p.grad.mul_(left[0])
            left[0] = left[0] * 0.9 + norm * 0.001

        return [p.register_post_accumulate_grad_hook(hook) for p in m.parameters()]

    _late(run, put)


def _masked_table(run: Run) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(12000, 64), nn.Linear(64, 64)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(tokens)).square().mean()

    def masked(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad[:6000] = 0
        return grad

    model = Table()
    model.table.weight.register_hook(masked)
    run.train(model, lambda m, i: _loss(m, run.tokens(i, most=12000)))


@situation(share=1.03)
def hook_copies_a_gradient(run: Run) -> None:
    """Some rows of a table of 3 MiB are trained: the mask takes a copy of its gradient after the planned backward."""
    _masked_table(run)


@situation(share=0.9, over=(0,), refused=Refusal("BudgetError", "after the planned backward"))
def hook_copies_more_than_there_is(run: Run) -> None:
    """The graphs have room, the hook behind them has none: the second step is refused."""
    _masked_table(run)


@situation(captures=-1)
def hook_that_only_looks(run: Run) -> None:
    """Activation statistics for a logger."""
    seen: list[float] = []
    _late(run, lambda m: [m.layers[3].register_forward_hook(lambda mod, args, out: seen.append(1.0))])
    run.see("calls of the hook", float(len(seen)))


@situation(captures=-1)
def global_hook_late(run: Run) -> None:
    """``register_module_forward_hook``: on every module of the process."""
    from torch.nn.modules import module

    handle = None
    model = run.fit(Chain())
    for i in range(5):
        if i == 2:
            handle = module.register_module_forward_hook(
                lambda mod, args, out: out * 2 if isinstance(mod, nn.Linear) else None
            )
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")
    assert handle is not None
    handle.remove()


def _layer_swapped(m: Any) -> None:
    m.layers[2] = nn.Linear(64, 64, bias=False)


CHANGES = {
    "dropout_rate": lambda m: setattr(m, "p", 0.3),
    "layer_replaced": _layer_swapped,
    "layer_forward": lambda m: setattr(m.layers[2], "forward", lambda x: x * 2),
    "weight_replaced": lambda m: setattr(m.layers[2], "weight", nn.Parameter(m.layers[2].weight.detach() * 2)),
    "weight_data": lambda m: setattr(m.layers[2].weight, "data", m.layers[2].weight.detach() * 2),
    "eval": lambda m: m.eval(),
    "part_in_eval": lambda m: m.layers[2].eval(),
    "frozen_part": lambda m: m.layers[2].requires_grad_(False),
    "bias_removed": lambda m: setattr(m.layers[2], "bias", None),
    "parametrized": lambda m: nn.utils.parametrizations.weight_norm(m.layers[2]),
}


@variants(CHANGES, captures=-1)
def changed_late(run: Run, change: Any) -> None:
    """What the step depends on changes after the second step."""
    model = run.fit(Chain(p=0.1))
    for i in range(5):
        if i == 2:
            torch.manual_seed(7)
            change(model)
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")

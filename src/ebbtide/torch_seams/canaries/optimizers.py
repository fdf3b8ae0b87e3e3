"""The canaries of ``optimizers`` and ``zero_grad``: steps, and gradients of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ebbtide.torch_seams import optimizers, zero_grad
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def steps_lie_below_their_hooks() -> None:
    """The function that a class steps with is the one that ``profile_hook_step`` wraps, without hooks."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    parameter.grad = torch.ones(2)
    optimizers.own_step(type(optimizer))(optimizer)
    expect(not calls, "an optimizer's own step calls hooks")
    expect(parameter.tolist() == [0.5, 0.5], "an optimizer's own step steps otherwise")
    optimizer.step()
    expect(len(calls) == 1, "hooks are not called by a step")
    looking = torch.optim.SGD([parameter], lr=0.5)
    order: list[str] = []
    looking.register_step_post_hook(lambda *_: order.append("registered"))
    handle = optimizers.first_of_step_post_hooks(looking, lambda *_: order.append("first"))
    frames: list[Any] = []
    looking.register_step_pre_hook(lambda *_: frames.append(optimizers.frame_of_step()))
    looking.step()
    expect(order == ["first", "registered"], f"hooks after a step are called as {order}")
    expect(frames[0] is not None and optimizers.frame_of_step() is None, "the frame of a step is not found")
    handle.remove()
    looking.step()
    expect(order[2:] == ["registered"], "a hook after a step cannot be removed")


class _Asked(torch.nn.Parameter):
    asked: int

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        _Asked.asked += 1
        return optimizers.gradient_of(self)


@canary
def gradients_are_read_past_a_descriptor() -> None:
    """A parameter may take a class whose ``grad`` is asked in Python alone: by what clears gradients too."""
    _Asked.asked = 0
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.__class__ = _Asked  # type: ignore[assignment]
    (parameter * 3).sum().backward()
    expect(not _Asked.asked, "autograd asks Python for a gradient")
    gradient = optimizers.gradient_of(parameter)
    expect(gradient is not None and gradient.tolist() == [3.0, 3.0], "a gradient is not found past a descriptor")
    optimizers.set_gradient(parameter, None)
    torch.optim.SGD([parameter], lr=0.1).zero_grad()
    module = torch.nn.Module()
    module.weight = parameter
    module.zero_grad()
    expect(_Asked.asked == 2, "what clears gradients does not ask for them")
    expect(not optimizers.has_gradient_hooks(parameter), "hooks are seen that nobody made")
    parameter.register_hook(lambda each: each)
    expect(optimizers.has_gradient_hooks(parameter), "a hook is not seen")


class _Sum(torch.autograd.Function):
    node: Any
    told: list[bool | None]

    @staticmethod
    def forward(ctx: object, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        _Sum.told = [optimizers.will_accumulate(_Sum.node, index) for index in (0, 1)]
        return gradients[0], gradients[0]


@canary
def a_backward_says_which_leaves_get_gradients() -> None:
    """All, those of ``inputs``, or none that is accumulated, where ``torch.autograd.grad`` runs."""
    one, other = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)

    def output() -> Tensor:
        made: Tensor = _Sum.apply(one, other)  # type: ignore[assignment]
        _Sum.node = made.grad_fn
        return made

    output().backward()
    expect(_Sum.told == [True, True], f"of all leaves is told {_Sum.told}")
    output().backward(inputs=[one])
    expect(_Sum.told == [True, False], f"of the first of two is told {_Sum.told}")
    torch.autograd.grad(output(), one)
    expect(_Sum.told == [None, False], f"of torch.autograd.grad is told {_Sum.told}")


@canary
def calls_of_zero_grad_are_seen() -> None:
    """Optimizers and modules drop gradients by a ``zero_grad`` that one class has for all."""
    module = torch.nn.Linear(2, 1, device="cpu")
    optimizer = torch.optim.SGD([module.weight])
    noted: list[list[Tensor]] = []
    for cleared, count in ((optimizer, 1), (module, 2)):
        module.weight.grad = torch.ones(1, 2, device="cpu")
        with zero_grad.watch_zero_grad(lambda parameters: noted.append(list(parameters))):
            cleared.zero_grad(set_to_none=False)
            expect(not noted and module.weight.grad is not None, "gradients that are set to zeros are dropped")
            cleared.zero_grad()
        expect(module.weight.grad is None, "zero_grad leaves gradients")
        expect(len(noted) == 1 and len(noted.pop()) == count, "a call of zero_grad is not seen")

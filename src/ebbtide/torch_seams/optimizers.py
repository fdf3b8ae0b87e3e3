"""What an optimizer's step is without its hooks and counters, and a parameter's gradient past whoever is asked.

1. ``Optimizer`` wraps the ``step`` of a class once (``profile_hook_step``), by ``functools.wraps``: hooks run in the
   wrapper. A scheduler wraps the ``step`` of an object, to count. The class's own function is below both.
2. The gradient of a tensor is a descriptor of its base in C. A class of a parameter that has another descriptor of the
   name is asked by whoever reads it in Python, and by nobody in C++: neither autograd nor an optimizer's kernels.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import torch

__all__ = [
    "closure_in",
    "first_of_step_post_hooks",
    "first_of_step_pre_hooks",
    "frame_of_step",
    "gradient_of",
    "has_gradient_hooks",
    "hook_bases",
    "is_last_before_step",
    "is_of_torch",
    "is_torchs_own",
    "living_optimizers",
    "needs_closure",
    "own_step",
    "parameters_stepped_by",
    "set_gradient",
    "steps_otherwise",
    "will_accumulate",
    "with_closure",
]

_GRADIENT: Any = torch._C.TensorBase.grad  # type: ignore[attr-defined]


def parameters_stepped_by(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters of its groups, in the order in which it steps."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step wants a closure, which calls the model within it (LBFGS)."""
    closure = inspect.signature(own_step(type(optimizer))).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def living_optimizers(parameters: Iterable[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Optimizers with one of ``parameters`` in their groups, whoever has them: all living objects are looked at.

    That takes a quarter of what a collection of garbage does.
    """
    kinds: list[type] = [torch.optim.Optimizer]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    known, own = set(map(id, kinds)), set(map(id, parameters))
    found: list[Any] = [each for each in gc.get_referrers(*kinds) if id(type(each)) in known]  # an object has its class
    groups = ((each, vars(each).get("param_groups") or ()) for each in found)  # one that is being made has none
    return [
        each
        for each, own_groups in groups
        if any(id(parameter) in own for group in own_groups for parameter in group.get("params", ()))
    ]


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class is one of torch's: all that its step depends on are its groups and its state."""
    return type(optimizer).__module__.startswith("torch.optim.")


def own_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The function of the class that steps, with neither hooks nor counters (definition 1)."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def hook_bases(optimizer: torch.optim.Optimizer) -> None:
    """Wrap the ``step`` of the bases of its class too, as torch does once an object of a base is made (definition 1).

    A class that calls its base's step is otherwise as it is until then, and another one from then on.
    """
    for kind in type(optimizer).__mro__[1:]:
        step: Any = vars(kind).get("step")
        if step is not None and kind is not torch.optim.Optimizer and not getattr(step, "hooked", False):
            wrapped: Any = torch.optim.Optimizer.profile_hook_step(step)
            wrapped.hooked = True
            kind.step = wrapped  # type: ignore[attr-defined]


def steps_otherwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody has put another ``step`` on the object than its class's, maybe wrapped to be counted."""
    own: Any = vars(optimizer).get("step")
    if own is None:
        return False
    inner: Any = inspect.unwrap(getattr(own, "__func__", own))
    of_class: Any = inspect.unwrap(type(optimizer).step)
    return getattr(inner, "__code__", inner) is not of_class.__code__


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its gradient, whoever else is asked (definition 2)."""
    return _GRADIENT.__get__(tensor)


def set_gradient(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Make ``gradient`` its gradient, likewise."""
    _GRADIENT.__set__(tensor, gradient)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether somebody has a hook for its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def first_of_step_post_hooks(optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> Any:
    """Call ``hook`` after every step, before all other hooks that are there; the handle removes it."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def first_of_step_pre_hooks(optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> Any:
    """Call ``hook`` before every step, before all other hooks that are there; the handle removes it."""
    handle = optimizer.register_step_pre_hook(hook)
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step, as a hook before it is given them."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with ``closure`` in the place of theirs: what a hook before a step returns to replace it."""
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})


def is_last_before_step(optimizer: torch.optim.Optimizer, handle: Any) -> bool:
    """Whether the hook of ``handle`` is the last that is called before a step."""
    return next(reversed(optimizer._optimizer_step_pre_hooks), None) == handle.id  # type: ignore[attr-defined]


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is one of torch's, which calls a closure once, before anything else, and takes any result."""
    return own_step(type(optimizer)).__module__.startswith("torch.optim.") and not isinstance(
        optimizer, torch.optim.LBFGS
    )


@functools.cache
def _calls_hooks() -> CodeType:
    """The code of every wrapper of definition 1: they are closures over different functions."""
    wrapper: Any = torch.optim.Optimizer.profile_hook_step(lambda: None)
    return wrapper.__code__


def frame_of_step() -> FrameType | None:
    """The frame of the wrapper of definition 1 that calls the hook that asks; ``None`` if none does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _calls_hooks():
        frame = frame.f_back
    return frame


def will_accumulate(node: Any, index: int) -> bool | None:
    """Whether the backward that runs hands a gradient to the leaf that went into ``node`` at ``index``.

    It does not where ``backward(inputs=...)`` names others; ``None`` if ``torch.autograd.grad`` wants that gradient.
    A node has an entry of ``next_functions`` for every tensor that went in.
    """
    leaf, _ = node.next_functions[index]
    if leaf is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(leaf))  # type: ignore[attr-defined]
    except RuntimeError:
        return None

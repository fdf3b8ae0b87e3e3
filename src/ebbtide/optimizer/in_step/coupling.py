"""Whether an optimizer's step may be taken for one parameter at a time: tried out on stand-ins, bit by bit.

1. For each group, and for one more with other numbers among its options, a few small tensors of the type and on the
   device of its parameters step all together, as the optimizer does, and one by one in another order, as gradients
   come in a backward. After each step parameters and state are compared. Gradients are large in some steps and small
   in others (:data:`_SCALES`), as there are couplings that begin at a size; then some have none, and then one is not
   finite.
2. What steps by a closure, counts its steps in its groups, couples parameters (a common norm, a common estimate),
   draws random numbers or calls its hooks from below is another one there, or raises, and is refused by name. So is
   what fails or changes anything where no parameter has a gradient, which is what its own step finds afterwards.
3. Nothing of the user's is changed: stand-ins have copies of what groups hold, and random states are put back.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ebbtide.cost.call import extent_of
from ebbtide.errors import UsageError
from ebbtide.measurement.resident import optimizers_in
from ebbtide.optimizer.in_step.single_parameter import step_parameter
from ebbtide.optimizer.state.combined import CombinedOptimizers
from ebbtide.optimizer.state.options import is_plain, options_of
from ebbtide.optimizer.state.stand_ins import stand_in_of, tried_out
from ebbtide.signals import raised_by_a_handler, signals_wait
from ebbtide.torch_seams.compiling_flag import while_nothing_is_captured
from ebbtide.torch_seams.dispatcher import Draws
from ebbtide.torch_seams.fake_tensors import without_modes
from ebbtide.torch_seams.optimizers import hook_bases, parameters_stepped_by, steps_otherwise
from ebbtide.torch_seams.storages import storage_key
from ebbtide.user_objects import builtin_of, elements_of, is_a

__all__ = ["may_step_inside", "refuse_coupled_steps"]

_SCALES = (1.0, 1e-3, 1e3, 1.0, 1e-6, 1.0)
"""Sizes of the gradients, a step each: norms are clipped from a size on, and what is small may be left out."""
_SHAPES = ((5, 3), (5,), (2, 4), (2,))
"""Shapes of stand-ins for matrices and their biases; others have a size of 2 or 3 in each dimension."""
_MOST_OF_A_GROUP = 4
_INSTEAD = 'leave step="inside" out: fit(model, budget, optimizer=optimizer) has its state in the budget'


def may_step_inside(optimizer: weakref.ref[torch.optim.Optimizer] | None) -> bool:
    """Whether :func:`refuse_coupled_steps` lets ``optimizer`` pass; nothing is known against one that is not there."""
    there = None if optimizer is None else optimizer()
    try:
        if there is not None:
            refuse_coupled_steps(there)
    except UsageError:
        return False
    return True


def refuse_coupled_steps(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step is not that of its parameters one by one.

    Raises:
        UsageError: saying what is another, and the line that works.
    """
    kind = type(optimizer).__name__
    if (
        isinstance(optimizer, CombinedOptimizers)
        or len(optimizers_in(optimizer)) > 1
        or "defaults" not in vars(optimizer)
    ):
        inner = vars(optimizer).get("optimizer")
        which = f"its .optimizer, a {type(inner).__name__}" if is_a(inner, torch.optim.Optimizer) else "the one"
        raise _refusal(f"{kind} holds other optimizers; give {which}, that steps")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _refusal("LBFGS takes one step for all of its parameters together, by calling a closure several times")
    if steps_otherwise(optimizer):
        raise _refusal(
            f"another step than that of its class was put on this {kind} (optimizer.step = ...), and updates would be "
            "those of the class; make it the step of a subclass"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise _refusal(f"{kind} is made with differentiable=True, and its step is a part of somebody's graph")
    if _overlap(parameters_stepped_by(optimizer)):
        raise _refusal(
            "two parameters lie in the same memory (one was given the other's .data), and which is stepped first "
            "decides; tie weights by one Parameter in both places"
        )
    try:
        with while_nothing_is_captured(), signals_wait(), without_modes(), tried_out(optimizer):
            difference = _difference(optimizer)
    except UsageError:
        raise
    except Exception as error:  # any optimizer of the user's may raise anything here
        if raised_by_a_handler(error):
            raise
        raise _refusal(f"{kind} cannot be stepped on single parameters ({type(error).__name__}: {error})") from error
    if difference:
        raise _refusal(f"{kind} {difference}")


def _refusal(why: str) -> UsageError:
    return UsageError(f'step="inside" is not accepted: {why}; {_INSTEAD}', argument="step", value="inside")


def _difference(optimizer: torch.optim.Optimizer) -> str:
    """What is another when parameters step one by one; empty if nothing is."""
    hook_bases(optimizer)
    together, alone = _stand_in(optimizer), _stand_in(optimizer)
    hooks: list[int] = []
    alone.register_step_pre_hook(lambda *_: hooks.append(1))
    for step in range(len(_SCALES) + 3):
        for group, others in zip(together.param_groups, alone.param_groups, strict=True):
            for position, (mine, other) in enumerate(zip(group["params"], others["params"], strict=True)):
                mine.grad, other.grad = _gradient(step, mine, position), None
        with Draws() as draws:
            together.step()
        for group in reversed(alone.param_groups):
            for position in reversed(range(len(group["params"]))):
                parameter = group["params"][position]
                if (gradient := _gradient(step, parameter, position)) is not None:
                    step_parameter(alone, group, parameter, gradient)
        if draws.found:
            return "draws random numbers while it steps, which come in the order of its parameters"
        if hooks:
            return "calls its hooks from below its own step"
        for each in parameters_stepped_by(together):
            each.grad = None
        if _all_of(together) != _all_of(alone):
            return (
                "does not step on each parameter for itself: stepping on stand-ins one by one gives other bits than "
                "all together, or other numbers in its groups or attributes"
            )
    before = _all_of(together)
    together.step()
    if before == _all_of(together):
        return ""
    return (
        "changes parameters or their state where there is no gradient, and after such a backward optimizer.step() "
        "finds none: what it does then would be done a second time"
    )


def _all_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """All bits of parameters, gradients and state, and what groups and attributes hold: somebody may count there."""
    parameters = parameters_stepped_by(optimizer)
    of_each = [_written([each, each.grad, optimizer.state[each]]) for each in parameters]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    own = {name: value for name, value in vars(optimizer).items() if name not in _OF_EVERY and name[:11] != _HOOKS}
    return [*of_each, _written(groups), _written(own)]


def _written(value: object) -> str:
    """What can be compared of ``value``, as text: of a dictionary what it holds, in whatever order."""
    if is_a(value, torch.Tensor):
        bits = value.detach()
        if bits.is_floating_point() or bits.is_complex():  # of what is no number the bits are nobody's business
            bits = torch.where(bits.isnan(), torch.full_like(bits, torch.nan), bits)
        return f"{tuple(bits.shape)} {bits.dtype} {bits.contiguous().view(-1).view(torch.uint8).tolist()}"
    if is_a(value, dict, set, list, tuple) and not is_plain(value) and (found := elements_of(value)) is not None:
        inside = list(map(_written, found[1]))
        return str(sorted(inside) if is_a(value, dict, set) else inside)
    bare = builtin_of(value)
    return repr(value if bare is None else bare) if is_plain(value) else ""


_OF_EVERY, _HOOKS = ("param_groups", "state", "defaults"), "_optimizer_"


def _gradient(step: int, like: torch.Tensor, position: int) -> torch.Tensor | None:
    """The gradient of a parameter at a position in its group (definition 1)."""
    scales, missing = len(_SCALES), step - len(_SCALES)
    if missing in (0, 1) and position % 2 == missing:
        return None
    scale = _SCALES[step] if step < scales else float("inf") if missing == 2 and position == 0 else 1.0
    return _drawn(like, 100 * step + 1, scale)


def _overlap(parameters: list[torch.nn.Parameter]) -> bool:
    """Whether two of the parameters share memory."""
    places = {id(each): each for each in parameters}.values()
    spans: dict[int, list[tuple[int, int]]] = {}
    for each in places:
        if each.numel():
            begin = int(each.storage_offset()) * each.element_size()
            end = begin + extent_of(each.shape, each.stride()) * each.element_size()
            spans.setdefault(storage_key(each), []).append((begin, end))
    ordered = (sorted(each) for each in spans.values())
    return any(after[0] < before[1] for each in ordered for before, after in itertools.pairwise(each))


def _stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    groups = [{**options_of(group), "params": list(_small(group["params"]))} for group in optimizer.param_groups]
    other = optimizer.param_groups[-1]
    groups.append({**_halved_options(options_of(other)), "params": list(_small(other["params"]))})
    try:
        return stand_in_of(optimizer, groups)
    except Exception as error:  # of the user's own constructor, which may raise anything
        if raised_by_a_handler(error):
            raise
        raise _refusal(
            f"{type(optimizer).__name__} cannot be made again from its groups to be tried out ({type(error).__name__}: "
            f"{error}); what they hold, such as lr, needs a default in its __init__"
        ) from error


def _halved_options(options: dict[str, Any]) -> dict[str, Any]:
    """Other numbers of the same kind: what steps by the options of a group that is not its parameter's is found out."""
    return {name: _halved(value) for name, value in options.items()}


def _halved(value: Any) -> Any:
    if is_a(value, tuple):
        return tuple(map(_halved, tuple.__iter__(value)))
    return float.__float__(value) / 2 if is_a(value, float) else value


def _small(parameters: list[torch.Tensor]) -> Iterator[torch.nn.Parameter]:
    """A few stand-ins, of each type and number of dimensions that there is; two of one kind where there is but one."""
    kinds = list(dict.fromkeys((each.dtype, each.ndim, each.device) for each in parameters))[:_MOST_OF_A_GROUP]
    kinds = kinds * 2 if len(kinds) == 1 else kinds
    for number, (dtype, dimensions, device) in enumerate(kinds):
        fitting = [shape for shape in _SHAPES if len(shape) == dimensions]
        place = number if len(set(kinds)) == 1 else number // 2  # a matrix and its bias have one length in common
        shape = fitting[place % len(fitting)] if fitting else (2, 3, 2, 3, 2, 3, 2, 3)[:dimensions]
        empty = torch.empty(shape, dtype=dtype, device="cpu" if device.type == "meta" else device)
        parameter = torch.nn.Parameter(empty)
        parameter.data.copy_(_drawn(parameter, 10 + number))
        yield parameter


def _drawn(like: torch.Tensor, seed: int, scale: float = 1.0) -> torch.Tensor:
    drawing = torch.Generator().manual_seed(seed + like.numel())
    return (scale * torch.randn(like.shape, generator=drawing)).to(device=like.device, dtype=like.dtype)

"""What is resident at a step's start: the storages reachable from the roots that the user names.

On CPU the allocator keeps no total, so the level is counted from roots: modules (parameters, buffers, gradients,
tensors in attributes), optimizers (their state), tensors, and containers of these. On CUDA the allocator is asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch

from ebbtide.measurement.leftovers import left_bytes
from ebbtide.step.resident_in_words import OPTIMIZER_STATE, WEIGHTS
from ebbtide.torch_seams.offloaded import is_offloaded
from ebbtide.torch_seams.optimizers import gradient_of, parameters_stepped_by
from ebbtide.torch_seams.storages import (
    StorageWatch,
    buffer_table,
    held_in,
    modules_in,
    parameter_table,
    parameters_in,
    parts_of,
    storage_key,
    with_storages,
)
from ebbtide.user_objects import attributes_of, elements_of, is_a, is_mapping

__all__ = [
    "GRADIENTS",
    "as_stepping",
    "device_of",
    "gradient_bytes",
    "gradient_watches",
    "gradients_to_come",
    "held_by",
    "hidden_in",
    "kept_by",
    "optimizers_in",
    "resident_bytes",
    "resident_parts",
    "start_bytes",
    "storages_in",
    "tensors_in",
    "watched_in",
]

GRADIENTS = "gradients of earlier steps"
"""A kind of what is resident."""


def tensors_in(root: object) -> Iterator[torch.Tensor]:
    """Every tensor with memory reachable from ``root``: a module, an optimizer, a tensor, or a container of these."""
    return _reachable(root, set())


def _reachable(root: object, entered: set[int]) -> Iterator[torch.Tensor]:
    kind = type(root)
    if kind is list or kind is tuple or kind is dict:
        yield from _in_container(root, entered)
    elif is_a(root, torch.Tensor):
        if is_offloaded(root):
            return
        yield from parts_of(root)
        if root.is_leaf and (gradient := gradient_of(root)) is not None:
            yield from parts_of(gradient)
    elif is_a(root, torch.nn.Module):
        yield from _tensors_of(root)
    elif is_a(root, torch.optim.Optimizer):
        for each in optimizers_in(root):
            yield from _reachable(held_by(each), entered)
            yield from tensors_in(parameters_stepped_by(each))
    else:
        yield from _in_container(root, entered)


def _in_container(root: object, entered: set[int]) -> Iterator[torch.Tensor]:
    if (found := _held(root)) is not None and id(root) not in entered:
        entered.add(id(root))  # around itself, for a container may hold itself
        for value in found:
            yield from _reachable(value, entered)
        entered.discard(id(root))


def _held(value: object) -> Iterable[object] | None:
    """What a container holds; ``None`` if it is none."""
    if (found := elements_of(value)) is not None:
        return found[1]
    return attributes_of(value).values() if is_mapping(value) else None


def optimizers_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """``optimizer``, and those that it holds and steps itself (lookahead, SAM, accelerate's, lists of some)."""
    found = [optimizer]
    for each in found:
        for value in attributes_of(each).values():
            for one in _held(value) or (value,):
                if is_a(one, torch.optim.Optimizer) and not any(one is known for known in found):
                    found.append(one)
    return found


def as_stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one that steps: ``optimizer``, or the one behind it if it was never made as one (accelerate's)."""
    while "defaults" not in vars(optimizer):
        inner = [each for each in optimizers_in(optimizer) if each is not optimizer]
        if not inner:
            break
        optimizer = inner[0]
    return optimizer


def kept_by(optimizer: torch.optim.Optimizer) -> list[object]:
    """What ``optimizer`` itself keeps from step to step: its state, and what it has put into its groups."""
    groups = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    return [*optimizer.state.values(), *groups]


def held_by(optimizer: torch.optim.Optimizer) -> tuple[list[object], list[torch.Tensor]]:
    """What :func:`kept_by` says, and tensors in other attributes (copies of the weights, tables), at any depth."""
    own = vars(optimizer).items()
    open_values: list[object] = [each for name, each in own if name not in _OF_EVERY and not name.startswith(_HOOKS)]
    seen = set[int]()
    found: list[torch.Tensor] = []
    for value in open_values:
        if is_a(value, torch.Tensor):
            found.append(value)
        elif id(value) not in seen and (held := _held(value)) is not None:
            seen.add(id(value))
            open_values += held
    return kept_by(optimizer), found


_OF_EVERY, _HOOKS = ("param_groups", "state", "defaults"), "_optimizer_"


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, their gradients and buffers, each module once, and what else its modules hold."""
    for each in modules_in(module):
        for parameter in parameter_table(each).values():
            if parameter is not None:
                yield from with_storages(parameter)
                if parameter.is_leaf and (gradient := gradient_of(parameter)) is not None:
                    yield from with_storages(gradient)
        yield from (
            part for buffer in buffer_table(each).values() if buffer is not None for part in with_storages(buffer)
        )
    yield from held_in(module)


def storages_in(roots: Iterable[object]) -> dict[int, int]:
    """Bytes of the distinct storages reachable from ``roots``, by key."""
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors_in(list(roots))}


def watched_in(roots: Iterable[object]) -> list[StorageWatch]:
    """A watch of each distinct storage reachable from ``roots``."""
    return [*{storage_key(tensor): StorageWatch(tensor) for tensor in tensors_in(list(roots))}.values()]


def resident_bytes(roots: Iterable[object], granularity_bytes: int = 1) -> int:
    """Bytes of the distinct storages reachable from ``roots``, each rounded up to ``granularity_bytes``."""
    return sum(-(-size // granularity_bytes) * granularity_bytes for size in storages_in(roots).values())


def resident_parts(
    model: torch.nn.Module,
    arguments: object,
    state: Iterable[object],
    granularity_bytes: int = 1,
    device: str | None = None,
) -> dict[str, int]:
    """Resident bytes of a model, a call's arguments and an optimizer's state by kind, each storage in the first kind.

    Args:
        model: with its gradients.
        arguments: of one call.
        state: tensors of the optimizer.
        granularity_bytes: as for :func:`resident_bytes`.
        device: ``"cuda"`` where only what a card holds counts.
    """
    parameters = [each for each in model.parameters() if not is_offloaded(each)]
    kinds: dict[str, Iterable[torch.Tensor]] = {
        WEIGHTS: (part for each in parameters for part in parts_of(each)),
        GRADIENTS: tensors_in([gradient_of(each) for each in parameters if each.is_leaf]),
        "buffers of modules": tensors_in(list(model.buffers())),
        OPTIMIZER_STATE: tensors_in(list(state)),
        "arguments of the call": tensors_in(arguments),
        "other tensors of modules": tensors_in(model),
    }
    found = dict.fromkeys(kinds, 0)
    seen: set[int] = set()
    for kind, tensors in kinds.items():
        for tensor in tensors:
            if device == "cuda" and tensor.device.type != device:
                continue
            if (key := storage_key(tensor)) not in seen:
                seen.add(key)
                size = tensor.untyped_storage().nbytes()
                found[kind] += -(-size // granularity_bytes) * granularity_bytes
    return found


def device_of(roots: Iterable[object]) -> str:
    """Device type of the first tensor reachable from ``roots``; ``"cpu"`` if there is none."""
    return next((t.device.type for t in tensors_in(list(roots))), "cpu")


def start_bytes(
    own: Mapping[int, int], optimizers: Iterable[torch.optim.Optimizer], others: Mapping[int, int], device: str
) -> int:
    """Bytes allocated right now that a step has to count.

    On CUDA that is all that the allocator has handed out. On CPU it is what the model and its optimizers reach, what
    still lives of what fitted models have returned and data loaders have given (``leftovers``), and ``others``, each
    storage once.

    Args:
        own: bytes of the model's storages by key.
        optimizers: whose state counts.
        others: likewise, of further storages: the call's arguments, those of forwards in flight.
        device: ``"cpu"`` or ``"cuda"``.
    """
    if device == "cuda":
        return torch.cuda.memory_allocated()
    state = storages_in(optimizers)
    reached = {**others, **state, **own}
    return sum(reached.values()) + left_bytes(reached)


def gradient_bytes(module: torch.nn.Module, granularity_bytes: int = 1) -> int:
    """Bytes of the storages of the gradients at the parameters of ``module``, each rounded up."""
    sizes: dict[int, int] = {}
    for gradient in map(gradient_of, parameters_in(module)):
        if gradient is not None:
            sizes[storage_key(gradient)] = gradient.untyped_storage().nbytes()
    return sum(-(-size // granularity_bytes) * granularity_bytes for size in sizes.values())


def gradient_watches(module: torch.nn.Module) -> list[StorageWatch]:
    """Watches of these gradients."""
    return [StorageWatch(each) for each in map(gradient_of, parameters_in(module)) if each is not None]


def gradients_to_come(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, granularity_bytes: int = 1
) -> int:
    """Bytes of the gradients that a module's parameters do not have yet: of those that take one, or are trained."""
    parts = [] if optimizer is None else optimizers_in(optimizer)
    trained = {id(each) for part in parts for each in parameters_stepped_by(part)}
    without = [
        each
        for each in module.parameters()
        if gradient_of(each) is None and (each.requires_grad or id(each) in trained)
    ]
    return sum(-(-each.nbytes // granularity_bytes) * granularity_bytes for each in without)


def hidden_in(inputs: Iterable[object], model: torch.nn.Module, arguments: object) -> list[weakref.ref[torch.Tensor]]:
    """Inputs of a captured step that no walk over its model and arguments finds.

    What an object, a closure or a global holds: the capture has them among its inputs, whatever holds them.
    """
    found = storages_in([model, arguments])
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    return [weakref.ref(each) for each in tensors if storage_key(each) not in found]

"""What the step of a call depends on besides the model: its arguments, modes, autocast, threads, what is frozen.

The key of an argument is read off without asking it for its text, which would print tensors, or an address that is
another at every call:
1. of a tensor or an array, how it is laid out, never its values;
2. of a number, a text, a type and the like, the value;
3. of a function, its code; of a dataclass, a mapping or any other object that has attributes, the keys of these, to a
   depth of :data:`_DEPTH` and of the first :data:`_LONG` of many; of anything else its class.
What a key does not tell, torch's guards do: a key may have several steps.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy
import torch

from ebbtide.cost.cache import product_precisions
from ebbtide.torch_seams.hooks import global_hooks
from ebbtide.torch_seams.storages import has_layout
from ebbtide.torch_seams.trees import tree_flatten
from ebbtide.user_objects import attributes_of, builtin_of, elements_of, is_a

__all__ = ["CallSlot", "Code", "key_of", "modes_of", "part_of", "structure_of", "with_sizes"]

_DEPTH = 6
_LONG = 256
_VALUES = (torch.dtype, torch.device, torch.layout)
_FUNCTIONS = (types.FunctionType, classmethod, staticmethod)


class CallSlot(NamedTuple):
    """Which call of a round it is.

    Attributes:
        key: of the call.
        depth: how many of the model's forwards were pending when it started.
        model: number of the fitted model.
    """

    key: object
    depth: int
    model: int = 0


def key_of(modes: object, args: Any, kwargs: Any) -> object:
    """The key of one training call. Two calls of one key may still be different steps: torch's guards know."""
    leaves, spec = tree_flatten((args, kwargs))
    return (tuple(part_of(leaf, with_sizes) for leaf in leaves), structure_of(spec), modes)


def structure_of(spec: Any) -> object:
    """The key of how arguments are nested; the text of a ``TreeSpec`` would be asked of the keys of dictionaries."""
    inner = tuple(map(structure_of, spec.children()))
    return None if spec.type is None else (_name_of(spec.type), part_of(spec.context, with_sizes), inner)


def part_of(value: object, of_tensor: Callable[[torch.Tensor], object]) -> object:
    """The key of an argument, or of what it holds; ``of_tensor`` gives that of a tensor."""
    return _Reader(of_tensor).read(value, _DEPTH)


class _Reader:
    """One walk over an argument. An object that comes a second time is named by its class alone."""

    def __init__(self, of_tensor: Callable[[torch.Tensor], object]) -> None:
        self._of_tensor = of_tensor
        self._seen: set[int] = set()

    def read(self, value: object, depth: int) -> object:
        if value is None:
            return None
        if is_a(value, torch.Tensor):
            return self._of_tensor(value)
        kind = _name_of(type(value))
        if is_a(value, *_VALUES):
            return (kind, repr(value))
        if (bare := builtin_of(value)) is not None:
            return (kind, repr(bare))
        if is_a(value, type):
            return (kind, type.__repr__(value))
        if is_a(value, types.FunctionType):
            return (kind, value.__code__)
        if is_a(value, numpy.ndarray):
            array = numpy.ndarray.view(value, numpy.ndarray)
            return (kind, array.shape, array.strides, str(array.dtype))
        if depth == 0 or id(value) in self._seen or is_a(value, torch.nn.Module, types.ModuleType):
            return kind
        self._seen.add(id(value))
        if is_a(value, dict):
            return (kind, dict.__len__(value), self._named(dict.items(value), depth))
        if (found := elements_of(value)) is not None and is_a(value, list, tuple):
            count, elements = found
            return (kind, count, tuple(self.read(each, depth - 1) for each in itertools.islice(elements, _LONG)))
        held = attributes_of(value)
        return (kind, len(held), self._named(held.items(), depth))

    def _named(self, items: Iterable[tuple[object, object]], depth: int) -> tuple[object, ...]:
        return tuple(
            (self.read(name, depth - 1), self.read(each, depth - 1)) for name, each in itertools.islice(items, _LONG)
        )


def _name_of(kind: Any) -> object:
    """What stands for a class in a key: itself, or its text if it has a metaclass, which may have no hash.

    torch's trees have a function, ``namedtuple``, for the class of every named tuple.
    """
    own = type(kind)
    return type.__repr__(kind) if own is not type and issubclass(own, type) else kind


def with_sizes(tensor: torch.Tensor) -> object:
    """How a tensor is laid out, and whether it takes a gradient; of a sparse or a nested one the kind of layout."""
    if not has_layout(tensor):
        return (tensor.layout, tensor.is_nested, tensor.dtype, tensor.device, tensor.requires_grad)
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def modes_of(module: torch.nn.Module, device: str, trained: bytes) -> object:
    """What a step depends on besides the model and its arguments; ``trained`` says which parameters take gradients."""
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return (module.training, *autocast, torch.get_num_threads(), trained, global_hooks(), _kernels_allowed())


def _kernels_allowed() -> tuple[bool | str, ...]:
    """Settings by which torch chooses kernels, of which a capture keeps the choice and its costs the workspace."""
    cuda = torch.backends.cuda
    return (
        bool(torch.backends.mkldnn.enabled),
        bool(torch.backends.cudnn.enabled),
        bool(torch.backends.cudnn.benchmark),
        bool(torch.backends.cudnn.deterministic),
        torch.are_deterministic_algorithms_enabled(),
        cuda.math_sdp_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        *product_precisions(),
    )


class Code:
    """The functions of a model's classes: one that is put on a class later makes another step. Torch guards none."""

    def __init__(self) -> None:
        self._functions_of_class: dict[type, tuple[tuple[int, ...], frozenset[object]]] = {}

    def of(self, classes: Iterable[type]) -> frozenset[object]:
        """The part of a key that says which functions these classes and their bases have."""
        kinds = {each for kind in classes for each in kind.__mro__}
        kinds.discard(torch.nn.Module)
        return frozenset([(kind, self._functions(kind)) for kind in kinds])

    def _functions(self, kind: type) -> frozenset[object]:
        names = vars(kind)
        now = tuple(map(id, names.values()))  # functions that are known are kept, so that no other has their id
        known = self._functions_of_class.get(kind)
        if known is None or known[0] != now:
            found = frozenset((name, value) for name, value in names.items() if isinstance(value, _FUNCTIONS))
            self._functions_of_class[kind] = known = (now, found)
        return known[1]

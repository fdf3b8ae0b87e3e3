"""Identity of storages, and the tables in which a module keeps its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch

from ebbtide.torch_seams.offloaded import is_offloaded
from ebbtide.torch_seams.optimizers import gradient_of
from ebbtide.user_objects import attributes_of, declares, elements_of, is_a, is_mapping

__all__ = [
    "StorageWatch",
    "buffer_table",
    "has_layout",
    "has_memory",
    "held_in",
    "modules_in",
    "parameter_table",
    "parameters_in",
    "parts_of",
    "storage_key",
    "version_of",
    "walk",
    "with_storages",
]

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_PLAIN = frozenset(
    map(id, [type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size])
)
"""Numbers of classes: a class of a user's may have a metaclass without a hash."""
_DEPTH = 4  # of containers in containers
_MANY, _SAMPLE = 256, 16
_OPAQUE: torch.layout = torch._mkldnn  # type: ignore[attr-defined]
"""Of tensors in a format of oneDNN's, whose memory torch does not show."""
_TORCHS = "torch.nn.modules."
_plain_names: dict[type, frozenset[str]] = {}
"""Per class of torch's own the names of attributes that hold no tensor in any module: sizes, flags and modes."""


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two living tensors have in common exactly if they share a storage; also for fake tensors.

    ``untyped_storage()._cdata`` is the address of the C++ storage. ``data_ptr()`` would not do: fake and empty storages
    have none, and two storages of no bytes have the same.
    """
    return tensor.untyped_storage()._cdata


def walk(module: torch.nn.Module) -> tuple[bytes, bool, dict[int, int], set[type], tuple[int, ...]]:
    """Per parameter whether it takes a gradient, whether all have one, bytes by key of storages, classes, hooks.

    Hooks on parameters have numbers, of which none is given twice.

    Parameters, their gradients and buffers, and what else modules hold (:func:`held_in`); each module once. Every
    planned step asks, so it is one plain loop over the tables: torch's own walks take several times as long.
    """
    modules = list(modules_in(module))
    held: list[object] = []
    hooks: list[int] = []
    trained: list[bool] = []
    sizes: dict[int, int] = {}
    accumulating = True
    classes: set[type] = set()
    for each in modules:
        classes.add(type(each))
        for parameter in each._parameters.values():
            if parameter is None:
                continue
            trained.append(parameter.requires_grad)
            if parameter._backward_hooks:
                hooks += parameter._backward_hooks
            if parameter._post_accumulate_grad_hooks:
                hooks += parameter._post_accumulate_grad_hooks
            _count(parameter, sizes)
            if parameter.is_leaf and (gradient := parameter.grad) is not None:
                _count(gradient, sizes)
            elif parameter.requires_grad:
                accumulating = False
        for buffer in each._buffers.values():
            if buffer is not None:
                _count(buffer, sizes)
        held += _attributes(each)
    for tensor in _tensors(held, set(map(id, modules))):
        _count(tensor, sizes)
    return bytes(trained), accumulating, sizes, classes, tuple(hooks)


def _count(tensor: torch.Tensor, sizes: dict[int, int]) -> None:
    """Enter the bytes of the storages of ``tensor`` into ``sizes``."""
    for part in with_storages(tensor):
        storage = part.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()


def modules_in(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """``module`` and its children, each once."""
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            if each._modules:
                waiting += [child for child in each._modules.values() if child is not None]


def parameters_in(module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters of ``module`` and its children; one that two modules share comes twice."""
    return [own for each in modules_in(module) for own in each._parameters.values() if own is not None]


def held_in(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that ``module`` and its children hold otherwise than as parameters and buffers, on the CPU.

    In attributes, in containers and dataclasses in attributes, and all of modules that are there. Of many elements the
    first few say whether there are tensors among them.
    """
    modules = list(modules_in(module))
    held = [value for each in modules for value in _attributes(each)]
    return _tensors(held, set(map(id, modules)))


def _attributes(module: torch.nn.Module) -> Sequence[object]:
    """What of the module's own attributes may hold a tensor."""
    kind, own = type(module), vars(module)
    if (known := _plain_names.get(kind)) is not None and own.keys() <= known:
        return ()
    found = [value for name, value in own.items() if name not in _OF_EVERY_MODULE and not _is_plain(value)]
    if not found and kind.__module__.startswith(_TORCHS):
        # What is None may become a tensor, and so may what is not the class's own: a user's attribute on one module.
        declared = {
            name
            for base in kind.__mro__
            for name in (*vars(base).get("__constants__", ()), *vars(base).get("__annotations__", ()))
        }
        plain = {name for name, value in own.items() if value is not None and name in declared}
        _plain_names[kind] = _OF_EVERY_MODULE | plain
    return found


def _is_plain(value: object) -> bool:
    """Whether it is no tensor and holds none, as is told at once; kernel sizes, strides and paddings among them."""
    if (kind := type(value)) is tuple or kind is list:
        return len(value) <= _SAMPLE and _PLAIN.issuperset(map(id, map(type, value)))  # type: ignore[arg-type]
    return id(kind) in _PLAIN


def _tensors(values: Iterable[object], seen: set[int]) -> Iterator[torch.Tensor]:
    """Tensors in ``values`` that have memory, to a depth; ``seen`` are ids of modules that are walked already."""
    waiting = [(value, _DEPTH) for value in values]
    looked_into: dict[int, tuple[int, object]] = {}  # a configuration is an attribute of every layer
    while waiting:
        value, depth = waiting.pop()
        if id(type(value)) in _PLAIN:
            continue
        if is_a(value, torch.Tensor):
            yield from filter(has_memory, with_storages(value))
            if value.is_leaf and (gradient := gradient_of(value)) is not None:
                waiting.append((gradient, 0))
        elif is_a(value, torch.nn.Module):
            if id(value) not in seen:
                seen.add(id(value))
                tables = (value._parameters, value._buffers, value._modules)
                waiting += ((each, depth) for table in tables for each in table.values())
                waiting += ((each, depth) for each in _attributes(value))
        elif depth and (id(value) not in looked_into or looked_into[id(value)][0] < depth):
            looked_into[id(value)] = depth, value  # which keeps its number
            waiting += _elements(value, depth)


def _elements(value: object, depth: int) -> list[tuple[object, int]]:
    """What a container, a dataclass or a mapping holds that may be a tensor, and how deep to look into it."""
    if (found := elements_of(value)) is None:
        mapping = is_mapping(value)
        if not mapping and (is_a(value, type) or not declares(type(value), "__dataclass_fields__")):
            return []
        deeper = depth if mapping else depth - 1  # a mapping of Python code keeps its values in a dictionary
        return [(each, deeper) for each in attributes_of(value).values() if id(type(each)) not in _PLAIN]
    count, each = found
    first = list(islice(each, _SAMPLE))
    if count > _MANY and _PLAIN.issuperset(map(id, map(type, first))):
        return []
    return [(held, depth - 1) for held in (*first, *each) if id(type(held)) not in _PLAIN]


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors whose storages are the memory of ``tensor``: itself, or what a sparse or wrapping one is made of.

    None of one in a format of oneDNN's (``to_mkldnn``), whose memory torch does not show.
    """
    if (flatten := getattr(type(tensor), "__tensor_flatten__", None)) is not None:
        parts = (getattr(tensor, name) for name in flatten(tensor)[0])
        for each in parts:
            if is_a(each, torch.Tensor):  # a DTensor of 2.13 has its mesh among them
                yield from parts_of(each)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout is not _OPAQUE:
        yield tensor


def with_storages(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """``tensor``, or the parts of a sparse one, which has no storage itself."""
    return (tensor,) if tensor.layout is torch.strided else parts_of(tensor)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` takes memory of the CPU: not an offloaded or fake one, nor one of a transform."""
    if is_offloaded(tensor):
        return False
    try:
        return tensor.untyped_storage().device.type == "cpu"
    except (RuntimeError, NotImplementedError):
        return False


def has_layout(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has sizes and strides: not a sparse or a nested one, nor one in a format of oneDNN's."""
    return tensor.layout is torch.strided and not tensor.is_nested


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written to."""
    return tensor._version


class StorageWatch:
    """A storage that is watched and not kept alive: while the watch lives, its key is nobody else's.

    A weak reference as ``torch.multiprocessing`` holds it (``untyped_storage()._weak_ref``).

    Args:
        tensor: whose storage it is.

    Attributes:
        key: :func:`storage_key` of the tensor.
        bytes: of the storage.
    """

    __slots__ = ("_forget", "_reference", "bytes", "key")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.key = storage._cdata
        self.bytes = storage.nbytes()
        self._forget = torch.UntypedStorage._free_weak_ref  # at the interpreter's end torch may be gone before this
        self._reference = storage._weak_ref()

    @property
    def alive(self) -> bool:
        """Whether some tensor has the storage still."""
        return not torch.UntypedStorage._expired(self._reference)

    def __del__(self) -> None:
        if hasattr(self, "_reference"):  # making it may have been interrupted
            self._forget(self._reference)


def parameter_table(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """A module's own parameters by name, the very table (``_parameters``); an entry may be ``None``."""
    return module._parameters


def buffer_table(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers by name, the very table (``_buffers``); an entry may be ``None``."""
    return module._buffers

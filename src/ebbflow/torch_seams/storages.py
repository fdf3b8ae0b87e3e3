"""Identity of storages, and the tables in which a module keeps its tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["StorageWatch", "buffer_table", "module_table", "parameter_table", "storage_key", "walk"]


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for two tensors exactly if they share a storage, while both are alive; also for fake tensors.

    ``untyped_storage()._cdata`` is the address of the C++ storage. ``data_ptr()`` would not do: fake and empty storages
    have none, and two storages of no bytes have the same.
    """
    return tensor.untyped_storage()._cdata


def walk(module: torch.nn.Module) -> tuple[bytes, bool, dict[int, int], set[type]]:
    """Per parameter whether it takes a gradient, whether all that do have one, bytes by key of all storages, classes.

    Parameters, their gradients and buffers; each module once. Every planned step asks, so it is one plain loop over
    the tables: torch's own walks take several times as long.
    """
    seen = {id(module)}
    waiting = [module]
    trained: list[bool] = []
    sizes: dict[int, int] = {}
    accumulating = True
    classes: set[type] = set()
    while waiting:
        each = waiting.pop()
        classes.add(type(each))
        for parameter in each._parameters.values():
            if parameter is None:
                continue
            trained.append(parameter.requires_grad)
            storage = parameter.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
            if parameter.is_leaf and (gradient := parameter.grad) is not None:
                storage = gradient.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
            elif parameter.requires_grad:
                accumulating = False
        for buffer in each._buffers.values():
            if buffer is not None:
                storage = buffer.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
        for child in each._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return bytes(trained), accumulating, sizes, classes


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
        self._forget(self._reference)


def parameter_table(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """A module's own parameters by name, the very table (``_parameters``); an entry may be ``None``."""
    return module._parameters


def buffer_table(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers by name, the very table (``_buffers``); an entry may be ``None``."""
    return module._buffers


def module_table(module: torch.nn.Module) -> Mapping[str, torch.nn.Module | None]:
    """A module's children by name, the very table (``_modules``); an entry may be ``None``."""
    return module._modules

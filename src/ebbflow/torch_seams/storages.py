"""Identity of storages, and the tables in which a module keeps its tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["buffer_table", "module_table", "parameter_table", "storage_key"]


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for two tensors exactly if they share a storage, while both are alive; also for fake tensors.

    ``untyped_storage()._cdata`` is the address of the C++ storage. ``data_ptr()`` would not do: fake and empty storages
    have none, and two storages of no bytes have the same.
    """
    return tensor.untyped_storage()._cdata


def parameter_table(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """A module's own parameters by name, the very table (``_parameters``); an entry may be ``None``."""
    return module._parameters


def buffer_table(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers by name, the very table (``_buffers``); an entry may be ``None``."""
    return module._buffers


def module_table(module: torch.nn.Module) -> Mapping[str, torch.nn.Module | None]:
    """A module's children by name, the very table (``_modules``); an entry may be ``None``."""
    return module._modules

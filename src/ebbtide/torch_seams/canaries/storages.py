"""The canaries of ``trees``, ``storages`` and ``hooks``: leaves, memory, and what modules keep."""

from __future__ import annotations

from collections import OrderedDict

import torch

from ebbtide.torch_seams import fake_tensors, hooks, storages, trees
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def trees_have_a_fixed_order() -> None:
    """Leaves come in the order of writing, the structure says the nesting and puts them back."""
    tree = {"b": (1, [2, None]), "a": OrderedDict(x=3)}
    leaves, spec = trees.tree_flatten(tree)
    expect(leaves == [1, 2, None, 3] == trees.tree_leaves(tree), f"leaves are {leaves}")
    expect(trees.tree_unflatten(leaves, spec) == tree, "a tree is not put together again")
    expect(trees.tree_map(lambda v: v, tree) == tree, "a tree is not mapped leaf by leaf")
    same, other = trees.tree_flatten({"b": (7, [8, 9]), "a": OrderedDict(x=0)})[1], trees.tree_flatten([1])[1]
    expect(str(same) == str(spec) != str(other), "the text of a structure does not tell nestings apart")


@canary
def storages_have_an_identity() -> None:
    """A view has its base's storage, another tensor does not, fake and empty ones included."""
    for mode in (fake_tensors.without_modes(), fake_tensors.FakeTensorMode()):
        with mode:
            for size in (4, 0):
                base, other = torch.empty(size), torch.empty(size)
                view = base.view(-1)[:2]
                expect(storages.storage_key(view) == storages.storage_key(base), "a view has a storage of its own")
                expect(storages.storage_key(other) != storages.storage_key(base), "two tensors share a storage")


@canary
def storages_can_be_watched() -> None:
    """A watch tells when the last tensor of a storage is gone, and keeps none alive."""
    tensor = torch.zeros(4)
    view = tensor[1:]
    watch = storages.StorageWatch(tensor)
    expect(watch.key == storages.storage_key(view), "a view has another key than its tensor")
    del tensor
    expect(watch.alive, "a storage is gone while a view of it lives")
    del view
    expect(not watch.alive, "a storage lives on without a tensor")


@canary
def modules_keep_tensors_in_tables() -> None:
    """Parameters, buffers and children lie in dictionaries; a tensor put there is the module's."""
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2, device="meta"))
    _, child = storages.modules_in(module)
    expect(set(storages.parameter_table(child)) == {"weight", "bias"}, "parameters lie elsewhere")
    expect("running_mean" in storages.buffer_table(child), "buffers lie elsewhere")
    storages.parameter_table(child)["weight"] = other = torch.nn.Parameter(torch.empty(2))
    expect(child.weight is other, "the table of parameters is a copy")


@canary
def hooks_on_every_module_are_seen() -> None:
    """Tables of the hooks on all modules, each registered under a number of its own."""
    kinds = [
        torch.nn.modules.module.register_module_forward_pre_hook,
        torch.nn.modules.module.register_module_forward_hook,
        torch.nn.modules.module.register_module_full_backward_pre_hook,
        torch.nn.modules.module.register_module_full_backward_hook,
    ]
    seen = {hooks.global_hooks()}
    for register in kinds:
        handle = register(lambda *_: None)  # type: ignore[arg-type]
        seen.add(hooks.global_hooks())
        handle.remove()
    expect(len(seen) == 1 + len(kinds), f"hooks of {len(kinds)} kinds are told apart: {seen}")

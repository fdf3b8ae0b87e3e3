"""The canaries of ``sharding``: where ``fully_shard`` keeps what it knows of a module, without any process group."""

from __future__ import annotations

import torch

from ebbtide.torch_seams import sharding
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def a_sharded_module_is_known_by_its_state() -> None:
    """Torch keeps it beside the modules, by a weak reference, in a class of a known name."""
    from torch.distributed._composable_state import _get_module_state, _insert_module_state
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    root, before = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), sharding.sharding_states()
    state = FSDPState()
    _insert_module_state(root, state)
    expect(_get_module_state(root) is state, "a module's state is kept otherwise")
    expect(sharding.sharding_states() != before, "a new state is not seen")
    expect(sharding.fully_sharded(root[0]) == "Sequential", "a module inside of a sharded one passes for whole")
    expect(sharding.fully_sharded(torch.nn.Sequential(root)) == "Sequential", "one around it passes for whole")
    expect(not sharding.fully_sharded(torch.nn.Linear(2, 2)), "another module passes for sharded")


@canary
def a_dtensor_is_known_by_its_class() -> None:
    """Where its module is loaded, it has that class; a plain tensor has not."""
    from torch.distributed.tensor import DTensor

    expect(issubclass(DTensor, torch.Tensor), "DTensor is no tensor")
    expect(not sharding.dtensors_in([("a", torch.ones(2)), ("b", 3)]), "a plain tensor passes for a DTensor")

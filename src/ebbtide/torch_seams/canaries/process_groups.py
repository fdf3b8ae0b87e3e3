"""The canaries of ``process_groups``: what stores answer and where a group's is found, without any other process."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from ebbtide.torch_seams import process_groups
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def a_store_answers_at_once() -> None:
    """It says whether a key is there without waiting, gives several at once, and adds."""
    store = distributed_c10d.PrefixStore("a", HashStore())
    expect(not store.check(["k"]), "a store has a key that nobody has set")
    store.set("k", "v")
    expect(store.check(["k"]) and not store.check(["k", "l"]), "a store does not know its keys")
    expect(store.multi_get(["k", "k"]) == [b"v", b"v"], "a store does not give several values at once")
    expect(store.add("n", 2) == 2 and store.add("n", 0) == 2, "a store does not add")


@canary
def a_group_has_a_store() -> None:
    """Torch keeps it by the group; a group that is not there, or not any more, has none."""
    expect(callable(distributed_c10d._get_process_group_store), "a group's store is found otherwise")
    expect(isinstance(distributed_c10d._world.pg_map, dict), "torch keeps its groups otherwise")
    expect(not process_groups.is_open(object()), "what is no group passes for one that is open")  # type: ignore[arg-type]
    expect(hasattr(dist.ProcessGroup, "_get_backend"), "a group does not say what exchanges for it")
    expect(process_groups.comes_from_a_collective(dist.DistBackendError("x")), "errors of backends have another class")

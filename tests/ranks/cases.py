"""What a rank does in a case (``launch``): functions of the rank and of how many there are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ebbtide
from ebbtide.errors import UsageError

WIDTH, ROWS = 48, 64


class Net(nn.Module):
    """Blocks with dropout, and the loss inside."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(blocks) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
        self.blocks, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)).square().mean()


# -- parameters that are shards -----------------------------------------------------------------------------------


def sharded(rank: int, size: int, *, how: str, order: str) -> dict[str, Any]:
    """What is said of a model that is sharded in one of the ways, before or after it is fitted, or after it ran."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh, net = init_device_mesh("cpu", (size,)), Net()
    fitted: nn.Module = net.blocks if how in ("blocks", "around") else net
    run = [lambda: ebbtide.fit(fitted, "110%", progress=None)]
    shard = lambda: _shard(net, mesh, how)  # noqa: E731
    call = lambda: net(torch.randn(ROWS, WIDTH)).backward()  # noqa: E731
    steps = {"before": [shard, *run, call], "after": [*run, shard, call], "later": [*run, call, call, shard, call]}
    for number, step in enumerate(steps[order]):
        try:
            step()
        except UsageError as error:
            return {"said": str(error), "at": number}
    return {"said": "", "at": -1}


def _shard(net: Net, mesh: Any, how: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    match how:
        case "whole" | "around":
            fully_shard(net, mesh=mesh)
        case "blocks" | "inside":
            fully_shard(net.blocks, mesh=mesh)
        case _:
            parallelize_module(net.blocks, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})


def sharded_in_every_way(rank: int, size: int) -> dict[str, Any]:
    """Of each way of sharding and each order, what is said, and at which of its steps."""
    ways = ("whole", "around", "blocks", "inside", "parallel")
    asked = [(how, order) for how in ways for order in ORDERS if order != "later" or how in ("around", "parallel")]
    found = {f"{how} {order}": sharded(rank, size, how=how, order=order) for how, order in asked}
    dist.barrier()
    return found


ORDERS = {"before": 1, "after": 2, "later": 4}
"""Of an order, the step at which a sharded model is refused."""

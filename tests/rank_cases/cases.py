"""What a rank does in a case (``launch``): functions of the rank and of how many there are."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ebbtide
from ebbtide.errors import EbbtideError, UsageError
from rank_cases.faults import FAULTS

WIDTH, ROWS = 48, 64
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}
"""Of the wrapper."""


class Net(nn.Module):
    """Blocks with dropout, and the loss inside."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(blocks) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
        self.blocks, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, 1)
        self.last, self.squares = "head", True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = getattr(self, self.last)(self.blocks(x))
        return out.square().mean() if self.squares else out.abs().mean()

    def rename(self) -> None:
        """Be a model with other names of parameters."""
        self.tail, self.last = self.head, "tail"
        del self.head


class Around(nn.Module):
    """A model of which the fitted one is a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.scale = nn.Linear(WIDTH, WIDTH), part, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.part(self.first(x))


def bits(module: nn.Module) -> str:
    """A digest of all parameters and buffers."""
    digest = hashlib.sha256()
    for each in module.state_dict().values():
        digest.update(each.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


# -- training -----------------------------------------------------------------------------------------------------


def train(
    rank: int,
    size: int,
    *,
    mode: str = "plain",
    fitted: bool = True,
    budget: str = "80%",
    other_budget: str = "",
    steps: int = 3,
    rows: Sequence[int] = (ROWS,),
    other_rows: Sequence[int] = (),
    parts: int = 1,
    buffers: bool = False,
    adam: bool = False,
    fault: str = "",
    at: int = 0,
    who: int = 1,
    others_fault: str = "",
    another_model: bool = False,
    held_bytes: int = 0,
    alone: str = "",
    again: str = "",
    around: bool = False,
    pairs: bool = False,
) -> dict[str, Any]:
    """Train a module inside of a wrapper; what is left, and what each step took.

    Args:
        rank: of this process.
        size: ranks.
        mode: of the wrapper.
        fitted: whether its module is fitted.
        budget: that it is fitted with.
        other_budget: that it is fitted with on rank ``who``, if it is another.
        steps: how many.
        rows: of the batch of each step; the last goes on.
        other_rows: of the batches of rank ``who``, if they are others.
        parts: batches to a step; all but the last are in ``no_sync``.
        buffers: whether the module has a batch norm.
        adam: whether rank ``who`` has an optimizer with state.
        fault: what goes wrong on rank ``who``.
        at: in which step, or in which plan.
        who: the rank that is another.
        others_fault: what goes wrong on all other ranks.
        another_model: whether rank ``who`` has a model with other names.
        held_bytes: what the model of rank ``who`` holds besides.
        alone: what rank ``who`` does alone before step ``at``.
        again: the budget with which a loop that has caught a refusal goes on.
        around: whether the wrapper is around a module that the fitted one is a part of.
        pairs: whether each backward goes through two forwards.
    """
    net = Net()
    if buffers:
        net.blocks.append(nn.BatchNorm1d(WIDTH))
    if another_model and rank == who:
        net.rename()
    if held_bytes and rank == who:
        net.besides = torch.empty(held_bytes, dtype=torch.uint8)  # in no exchange, as it is no buffer
    wrapper = DistributedDataParallel(Around(net) if around else net, **MODES[mode])
    if fitted:
        asked = other_budget if other_budget and rank == who else budget
        ebbtide.fit(net, asked, progress=None, options=ebbtide.Options(effort=20))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.01)
    if adam and rank == who:
        optimizer = torch.optim.AdamW(wrapper.parameters(), lr=0.01)
    own_fault = fault if rank == who else others_fault
    if own_fault:
        FAULTS[own_fault](at)
    torch.manual_seed(10 + rank)
    own = list(other_rows) if other_rows and rank == who else list(rows)
    losses, seconds, caught = list[float](), list[float](), list[str]()
    for step in range(steps):
        if alone and rank == who and step == at:
            _alone(alone, net, wrapper, fitted=fitted)
        count = own[min(step, len(own) - 1)]
        batches = [torch.randn(count, WIDTH) for _ in range(parts)]
        begin = time.monotonic()
        for _ in range(2):
            try:
                losses.append(_step(wrapper, batches, pairs=pairs))
                break
            except EbbtideError as error:
                if not again or caught:
                    raise
                caught.append(f"{type(error).__name__}: {error}")
                ebbtide.set_budget(net, again)
                optimizer.zero_grad()
        seconds.append(time.monotonic() - begin)
        optimizer.step()
        if not (alone == "accumulates" and rank == who and step == at):
            optimizer.zero_grad()
    found: dict[str, Any] = {"bits": bits(wrapper.module), "losses": losses, "seconds": seconds, "caught": caught}
    if fitted and not (alone == "unfit" and rank == who):
        found["planned"] = ebbtide.calls_of(net).planned
    dist.barrier()
    return found


def groups(rank: int, size: int, *, fitted: bool) -> dict[str, Any]:
    """Train in one process group after another."""
    found = [train(rank, size, fitted=fitted)["bits"]]
    dist.destroy_process_group()
    store = Path(os.environ["RANK_FILES"]).parent / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    return {"bits": [*found, train(rank, size, fitted=fitted)["bits"]]}


def _step(wrapper: DistributedDataParallel, batches: Sequence[torch.Tensor], *, pairs: bool) -> float:
    loss = torch.zeros(())
    for part, batch in enumerate(batches, start=1):
        with wrapper.no_sync() if part < len(batches) else contextlib.nullcontext():
            loss = wrapper(batch) + wrapper(batch.flip(0)) if pairs else wrapper(batch)
            loss.backward()
    return loss.item()


def _alone(what: str, net: Net, wrapper: DistributedDataParallel, *, fitted: bool) -> None:
    """What one rank does and the others do not."""
    match what:
        case "set_budget" if fitted:
            ebbtide.set_budget(net, "90%")
        case "unfit" if fitted:
            ebbtide.unfit(net)
        case "no_grad":
            with torch.no_grad():
                net(torch.zeros(4, WIDTH))
        case "evaluates":
            with torch.no_grad():
                wrapper(torch.zeros(4, WIDTH))
        case "drops a graph":
            for _ in range(2):
                wrapper(torch.zeros(ROWS, WIDTH))
        case "sums more":
            with wrapper.no_sync():
                wrapper(torch.zeros(ROWS, WIDTH)).backward()
        case "branch":
            net.squares = False
        case _:
            pass  # "accumulates": gradients of this step stay where they are, so that the next is another


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


# -- what agreement costs -----------------------------------------------------------------------------------------


def agreement(rank: int, size: int) -> dict[str, Any]:
    """Seconds of what ``fit`` and a first call ask, for the rank that comes last to each, and of a steady step's."""
    from ebbtide._api import fit as fitting
    from ebbtide.ranks import backwards, member
    from ebbtide.ranks.first_call import FirstCall

    seconds: list[float] = []

    def timed(function: Any) -> Any:
        def call(*args: Any) -> Any:
            time.sleep(0.5 * rank)
            begin = time.perf_counter()
            found = function(*args)
            seconds.append(time.perf_counter() - begin)
            return found

        return call

    FirstCall.come, FirstCall.planned = timed(FirstCall.come), timed(FirstCall.planned)
    member._member, fitting.say_alive = timed(member._member), timed(fitting.say_alive)
    net = Net()
    wrapper = DistributedDataParallel(net)
    ebbtide.fit(net, "80%", progress=None, options=ebbtide.Options(effort=20))
    wrapper(torch.randn(ROWS, WIDTH)).backward()
    dist.barrier()
    first = sum(seconds)
    own = member._members[wrapper]
    assert own is not member.ALONE
    count, before = 2000, next(iter(wrapper._forward_pre_hooks.values()))
    with wrapper._inside_ddp_forward():
        begin = time.perf_counter()
        for _ in range(count):
            before(wrapper, ())
            found = member.member_of(net)
            assert found is own
            found.enter(dict)
            exchange = found.exchange()
            found.leave()
            exchange.begins()
            exchange.begins()
            exchange.ends()
            backwards._running.returns()
        steady = (time.perf_counter() - begin) / count
    dist.barrier()
    return {"first_seconds": first, "steady_seconds": steady}

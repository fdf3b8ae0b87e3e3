"""``DistributedDataParallel`` over gloo: the module inside is fitted, and two processes train as they do without.

All that two processes are needed for runs in one pair of them, which say what they found in files.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ebbtide
from ebbtide.errors import CaptureError, UsageError
from ebbtide.torch_seams.data_parallel import bucket_bytes

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views of buckets": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 0.02},
    "accumulated": {},
    "accumulated views": {"gradient_as_bucket_view": True},
    "fitted late": {},
    "unused, outputs": {"find_unused_parameters": True},
    "static, outputs": {"static_graph": True},
}
SAMPLE = ("plain", "accumulated views", "fitted late")
STEPS, PARTS = 4, 2


class Net(nn.Module):
    """Layers with dropout and batch norm; one of them is used in every other step if ``branching``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [m for _ in range(5) for m in (nn.Linear(48, 48), nn.BatchNorm1d(48), nn.GELU(), nn.Dropout(0.1))]
        self.blocks, self.head, self.idle = nn.Sequential(*blocks), nn.Linear(48, 1), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, idle: bool = False) -> torch.Tensor:
        out = self.head(self.blocks(x)).square().mean()
        return out if idle else out + self.idle.weight.sum() + self.idle.bias.sum()


def trained(way: str, rank: int, *, fitted: bool) -> dict[str, Any]:
    """What training leaves: bits, and with a plan how its calls went and what it counts as resident."""
    settings, late = WAYS[way], way == "fitted late"
    net = WithOutputs() if way.endswith("outputs") else Net()
    if fitted and not late:
        ebbtide.fit(net, "80%", progress=None)
    wrapper = DistributedDataParallel(net, **settings)
    if fitted and late:
        ebbtide.fit(net, "80%", progress=None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(10 + rank)
    losses = list[float]()
    for _ in range(STEPS):
        parts = PARTS if way.startswith("accumulated") else 1
        for part in range(parts):
            with wrapper.no_sync() if part + 1 < parts else contextlib.nullcontext():
                outputs = wrapper(torch.randn(256, 48), idle=way.startswith("unused"))
                loss = outputs["loss"] if isinstance(outputs, dict) else outputs
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    left: dict[str, Any] = {
        "bits": [each.tolist() for each in net.state_dict().values()],
        "drawn": torch.get_rng_state().tolist(),
        "losses": losses,
    }
    if fitted:
        calls, step = ebbtide.calls_of(net), ebbtide.step_of(net)
        assert step is not None
        own = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in net.state_dict().values()}
        left["planned"], left["unplanned"] = calls.planned, sum(calls.unplanned.values())
        state = sum(each.nbytes for of_one in optimizer.state.values() for each in of_one.values())
        left["resident"] = step.plan.resident_bytes - sum(own.values()) - 256 * 48 * 4 - state
        left["buckets"] = sum(
            each.buffer().numel() * each.buffer().element_size()
            for each in wrapper.reducer._get_zeros_like_grad_buckets()
        )
    return left


class WithOutputs(Net):
    """Returns what its loss is made of beside it, as Hugging Face's models do."""

    def forward(self, x: torch.Tensor, idle: bool = False) -> Any:
        return {"loss": super().forward(x, idle), "logits": self.head(x)}


class Talking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_reduce_coalesced

        return all_reduce_coalesced([self.layer(x)], "sum", dist.group.WORLD)[0].sum()


def refused(call: Any, error: type[Exception]) -> str:
    try:
        call()
    except error as found:
        return str(found)
    return "not refused"


def buckets_beside_gradients() -> list[int]:
    """Bytes of buckets that are no gradients, of a wrapper with views of them: before, in ``no_sync`` and after."""
    net = Net()
    wrapper = DistributedDataParallel(net, gradient_as_bucket_view=True)
    found = list[int]()
    net.register_forward_pre_hook(lambda *_: found.append(bucket_bytes(net)))
    for context in (wrapper.no_sync, wrapper.no_sync, contextlib.nullcontext, wrapper.no_sync):
        with context():
            wrapper(torch.randn(8, 48)).backward()
    return found


def in_process(rank: int, folder: str, ways: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: dict[str, Any] = {
        way: {"eager": trained(way, rank, fitted=False), "fitted": trained(way, rank, fitted=True)} for way in ways
    }
    found["beside gradients"] = buckets_beside_gradients()
    wrapper = DistributedDataParallel(Net())
    found["wrapper"] = refused(lambda: ebbtide.fit(wrapper, "80%"), UsageError)
    talking = ebbtide.fit(Talking(), "80%", progress=None)
    found["talking"] = refused(lambda: talking(torch.randn(4, 8)), CaptureError)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def both(folder: Path, ways: Sequence[str]) -> list[dict[str, Any]]:
    """What each of two processes has found, of training in some ways."""
    context: Any = torch.multiprocessing.spawn(in_process, (str(folder), ways), nprocs=2, join=False)
    while not context.join():
        pass
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return both(tmp_path_factory.mktemp("pair"), SAMPLE)


@pytest.mark.long
def test_two_processes_train_in_every_other_way(tmp_path: Path) -> None:
    others = [way for way in WAYS if way not in SAMPLE]
    pair = both(tmp_path, others)
    for way in others:
        assert_trained_as_without(pair, way)
        if way != "accumulated":
            assert_buckets_are_resident(pair, way)


@pytest.mark.parametrize("way", SAMPLE)
def test_two_processes_train_as_without(way: str, pair: list[dict[str, Any]]) -> None:
    assert_trained_as_without(pair, way)


def assert_trained_as_without(pair: list[dict[str, Any]], way: str) -> None:
    for rank in pair:
        eager, fitted = rank[way]["eager"], rank[way]["fitted"]
        assert {key: fitted[key] for key in eager} == eager
        assert fitted["planned"] == len(fitted["losses"])
        assert fitted["unplanned"] == 0
    one, other = pair
    assert one[way]["fitted"]["drawn"] != other[way]["fitted"]["drawn"]  # they had data of their own


@pytest.mark.parametrize("way", [way for way in SAMPLE if not way.startswith("accumulated")])
def test_buckets_are_resident(way: str, pair: list[dict[str, Any]]) -> None:
    assert_buckets_are_resident(pair, way)


def assert_buckets_are_resident(pair: list[dict[str, Any]], way: str) -> None:
    for rank in pair:
        fitted = rank[way]["fitted"]
        assert fitted["buckets"] > 40_000
        assert 0 <= fitted["resident"] - fitted["buckets"] < 2_000


def test_gradients_of_their_own_are_beside_the_buckets(pair: list[dict[str, Any]]) -> None:
    """In ``no_sync`` gradients that were ``None`` get memory of their own; views of buckets are made when they talk."""
    total = sum(each.numel() * each.element_size() for each in Net().parameters())
    for rank in pair:
        assert rank["beside gradients"] == [total, total, total, 0]


def test_the_wrapper_and_what_talks_inside_are_refused_by_name(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert "ebbtide.fit(model.module, ...)" in rank["wrapper"]
        assert "all_reduce_coalesced" in rank["talking"]
        assert "agreed on between processes" in rank["talking"]


def test_data_parallel_over_devices_is_refused() -> None:
    wrapper = nn.DataParallel(nn.Linear(2, 2))
    wrapper.device_ids = [0, 1]
    with pytest.raises(UsageError, match="DistributedDataParallel, one process per device"):
        ebbtide.fit(wrapper, "80%")


def test_sharded_modules_are_refused() -> None:
    class FSDPModule(nn.Linear):
        pass

    with pytest.raises(UsageError, match="sharded by FSDPModule"):
        ebbtide.fit(nn.Sequential(FSDPModule(2, 2)), "80%")

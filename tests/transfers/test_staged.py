"""The disk tier of a CUDA device: piece by piece through pinned memory, against the fake device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ebbtide.errors import TierError
from ebbtide.tiers import parse_tiers
from ebbtide.transfers import staged
from ebbtide.transfers.arena import Arena
from ebbtide.transfers.disk import DiskTier, Region
from ebbtide.transfers.host import HostTier, host_tier
from ebbtide.transfers.slots import Slot, Space
from ebbtide.transfers.staged import StagedDisk, staged_disk
from ebbtide.transfers.streams import Edge
from ebbtide.transfers.tiers import open_tiers
from fake_cuda import FakeDevice, Race

SHAPE = (50, 21)  # 4,200 bytes: more than two pieces


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "_PIECE_BYTES", 2000)


class Bench:
    def __init__(self, device: FakeDevice, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = device
        self.tier = StagedDisk(DiskTier(directory), HostTier(device))
        space, size = Space({}), torch.Size(SHAPE).numel() * 4
        self.slots = tuple(
            Slot(i, f"b{i}", "disk", space.take("disk", size), size, SHAPE, (21, 1), torch.float32, torch.device("cpu"))
            for i in range(2)
        )
        monkeypatch.setattr(Slot, "empty", lambda slot: device.allocate(slot))

    def step(self, values: tuple[int, int]) -> None:
        device = self.device
        arena = Arena(self.slots, {"disk": self.tier})
        for index, value in enumerate(values):
            tensor = self.slots[index].empty()
            device.write(tensor, value)
            arena.offload(index, tensor)
            arena.settle(index, tensor)
            del tensor
        for index, value in enumerate(values):
            device.write(self.slots[0].empty(), 0xAA)
            coming = arena.reload(index)
            device.read(arena.arrive(index, coming), value)
            del coming
        arena.close()


@pytest.mark.parametrize("seed", range(3))
def test_what_left_through_pieces_comes_back(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(device := FakeDevice(seed, may_wait=True), tmp_path, monkeypatch)
    for step in range(3):
        bench.step((10 * step + 1, 10 * step + 2))
    device.run()
    assert device.pinned_sizes == [2000], "one piece, whatever moves"
    assert device.used == {Edge.MADE, Edge.ROOM}


@pytest.mark.parametrize("edge", [Edge.MADE, Edge.ROOM])
def test_without_an_edge_bytes_are_wrong(edge: Edge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(device := FakeDevice(may_wait=True, without={edge}), tmp_path, monkeypatch)

    def run() -> None:
        bench.step((1, 2))
        device.run()

    with pytest.raises((Race, TierError), match="is expected"):  # the lane's thread may be the one that sees it
        run()


@pytest.mark.parametrize("way", ["write", "read"])
def test_a_failing_disk_is_said(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    bench = Bench(FakeDevice(may_wait=True), tmp_path, monkeypatch)
    monkeypatch.setattr(Region, way, fail)
    with pytest.raises(TierError, match="Input/output error, in a file in"):
        bench.step((1, 2))
    monkeypatch.undo()


def test_a_cuda_model_gets_the_host_and_the_staged_disk(tmp_path: Path) -> None:
    found = open_tiers(parse_tiers(["host", f"disk:{tmp_path}"]), "cuda")
    assert found["host"] is host_tier()
    assert found["disk"] is staged_disk(tmp_path)

"""Links are measured once, through the lane that steps use, and a damaged file is measured again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ebbtide.errors import TierError
from ebbtide.step.machine import Link, Machine, is_elsewhere
from ebbtide.transfers import host, host_link, links
from ebbtide.transfers.disk import DiskTier
from ebbtide.transfers.host import HostTier
from ebbtide.transfers.host_link import like_of
from ebbtide.transfers.links import COUNTED_ON, is_measured, measured_host_link, measured_link, this_machine
from ebbtide.transfers.staged import StagedDisk
from fake_cuda import FakeDevice


@pytest.fixture(autouse=True)
def _small_probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(links, "cache_directory", lambda: tmp_path / "cache")
    monkeypatch.setattr(links, "_PROBE_BYTES", 2**20)
    monkeypatch.setattr(links, "_PIECE_BYTES", 2**18)
    monkeypatch.setattr(links, "_SMALL_BYTES", 2**12)


def test_a_link_is_measured_once_and_kept(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    assert not is_measured(tmp_path)
    first = measured_link(tier)
    assert is_measured(tmp_path)
    assert first.tier == "disk"
    assert not first.duplex
    assert first.out_bytes_per_second > 1e6
    assert first.in_bytes_per_second > 1e6
    assert 0 < first.latency_seconds < 1
    assert 0 <= first.compute_share < 1
    assert 0 < first.capacity_bytes
    again = measured_link(tier)
    assert again.out_bytes_per_second == first.out_bytes_per_second
    assert measured_link(tier, anew=True).latency_seconds != first.latency_seconds


def test_a_damaged_or_old_file_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path)
    measured_link(tier)
    (path,) = (tmp_path / "cache" / "links").glob("disk-*.json")
    path.write_text(path.read_text().replace("0", "1"))
    assert not is_measured(tmp_path)
    measured_link(tier)
    assert is_measured(tmp_path)
    monkeypatch.setattr(links, "_VALID_SECONDS", -1.0)
    assert not is_measured(tmp_path)


def test_the_machine_at_hand_has_its_links_and_is_at_hand(tmp_path: Path) -> None:
    assert this_machine({}) is None
    machine = this_machine({"disk": DiskTier(tmp_path)})
    assert machine is not None
    assert not is_elsewhere(machine)
    assert set(machine.links) == {"disk"}
    assert Machine.from_json(machine.to_json()) == machine


# -- a card that is a fake -----------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The current card."""
    monkeypatch.setattr(host_link, "_PIECE_BYTES", 2**16)
    monkeypatch.setattr(host_link, "_SMALL_BYTES", 2**10)
    monkeypatch.setattr(links, "card", lambda: (torch.device("cpu"), "a fake", "8.0", 80 * 2**30))
    return FakeDevice(may_wait=True)


def test_the_link_to_the_host_is_measured_by_the_card_and_kept(fake: FakeDevice) -> None:
    tier = HostTier(fake)
    link, source = measured_host_link(tier)
    assert source == "measured here, on a fake"
    assert (link.tier, link.duplex) == ("host", True), "both ways at once take as long as one"
    # The fake's clock counts operations: eight copies of a piece take eight seconds.
    assert link.out_bytes_per_second == link.in_bytes_per_second == 2**16
    assert link.least_bytes > 0, "small tensors do not pay (ms-swift#7201, unsloth#3867)"
    assert link.capacity_bytes < (host.free_host_bytes() or 0)
    given = len(fake.operations)
    assert measured_host_link(tier)[0].latency_seconds == link.latency_seconds
    assert len(fake.operations) == given, "it is not measured again"
    measured_host_link(tier, anew=True)
    assert len(fake.operations) > given
    fake.run()


def test_plans_count_on_a_part_of_what_a_card_was_measured_to_do(fake: FakeDevice) -> None:
    tier = HostTier(fake)
    whole, _ = measured_host_link(tier)
    machine = this_machine({"host": tier}, "cuda")
    assert machine is not None
    link = machine.links["host"]
    assert link.out_bytes_per_second == COUNTED_ON * whole.out_bytes_per_second
    assert link.in_bytes_per_second == COUNTED_ON * whole.in_bytes_per_second
    assert link.latency_seconds == whole.latency_seconds
    assert machine.sources["links.host"] == "measured here, on a fake; plans count on 80.00 % of its rates"
    fake.run()


def test_a_card_without_room_for_the_probe_has_the_link_of_the_catalogue(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(links, "measure_host", full)
    link, source = measured_host_link(HostTier(fake))
    assert source.startswith("as of a100-80gb, which is most like this card")
    assert link.out_bytes_per_second == like_of("8.0", 80 * 2**30)[1].out_bytes_per_second
    assert like_of("99.0", 0)[1].tier == "host"


def test_a_card_that_the_catalogue_does_not_know_is_not_taken_for_one_beside_its_host() -> None:
    """A B300 is next to a GB200 by its memory, but may be on PCI Express."""
    assert like_of("10.0", 185 * 2**30)[0] == "gb200-186gb"
    name, link = like_of("10.3", 270 * 2**30)
    assert (name, link.out_bytes_per_second) == ("b200-180gb", 50.4e9)


def test_a_host_without_room_for_the_probe_says_so(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_host_bytes", lambda: 1000)
    with pytest.raises(TierError, match="needs"):
        measured_host_link(HostTier(fake))


def test_a_card_reaches_a_disk_through_the_host(fake: FakeDevice, tmp_path: Path) -> None:
    tier = HostTier(fake)
    machine = this_machine({"host": tier, "disk": StagedDisk(DiskTier(tmp_path), tier)}, "cuda")
    assert machine is not None
    assert (machine.device, machine.granularity_bytes, is_elsewhere(machine)) == ("cuda", 512, False)
    to_host, to_disk, disk = machine.links["host"], machine.links["disk"], measured_link(DiskTier(tmp_path))

    def seconds(link: Link) -> float:
        return link.seconds(2**20, "out")

    assert seconds(to_disk) == pytest.approx(seconds(to_host) + seconds(disk))
    assert Machine.from_json(machine.to_json()) == machine

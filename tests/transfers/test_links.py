"""Links are measured once, through the lane that steps use, and a damaged file is measured again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.step.machine import Machine, is_elsewhere
from ebbflow.transfers import links
from ebbflow.transfers.disk import DiskTier
from ebbflow.transfers.links import is_measured, measured_link, this_machine


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

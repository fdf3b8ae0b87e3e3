"""``ebbtide calibrate``: what is measured is kept, told and used by later plans."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ebbtide.cli import app
from ebbtide.cost import calibrate as costs
from ebbtide.step import machine as machines
from ebbtide.step.machine import catalogue, machine_named
from ebbtide.tiers import Tier
from ebbtide.transfers import host_link, links, tiers
from ebbtide.transfers.host import HostTier
from fake_cuda import FakeDevice


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (machines, links):
        monkeypatch.setattr(module, "cache_directory", lambda: tmp_path / "cache")
    monkeypatch.setattr(costs, "_SIZE", 64)
    monkeypatch.setattr(costs, "_VECTOR_BYTES", 2**16)
    monkeypatch.setattr(costs, "_APART", float("inf"))
    monkeypatch.setattr(costs, "_LEAST_USED", 0.0)
    monkeypatch.setattr(links, "_PROBE_BYTES", 2**20)
    monkeypatch.setattr(links, "_PIECE_BYTES", 2**18)
    monkeypatch.setattr(links, "_SMALL_BYTES", 2**12)


def test_what_is_measured_is_told_kept_and_used(tmp_path: Path) -> None:
    assert machine_named("cpu") == catalogue()["cpu"]
    result = CliRunner().invoke(app, ["calibrate", "--tiers", f"disk:{tmp_path}"])
    assert result.exit_code == 0, result.output
    for word in ("arithmetic", "in float32", "memory", "least op", "out,", "both ways at once", "kept in"):
        assert word in result.stdout
    measured = machine_named("cpu")
    assert measured.flops != catalogue()["cpu"].flops
    assert measured.flops["float32"] > 1e6
    assert measured.bytes_per_second > 1e6
    assert 0 < measured.launch_seconds < 1
    assert "ebbtide calibrate" in measured.sources["flops"]
    assert links.is_measured(tmp_path)


@pytest.mark.parametrize(("limit", "value"), [("_APART", -1.0), ("_LEAST_USED", float("inf"))])
def test_on_a_busy_machine_nothing_is_kept(
    limit: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, limit, value)  # no two rounds take the same time, and none has a core for longer
    result = CliRunner().invoke(app, ["calibrate", "--tiers", f"disk:{tmp_path}"])
    assert result.exit_code == 1
    assert "other work has disturbed this (arithmetic in float32, " in result.stderr
    assert "kept in" not in result.stdout
    assert machine_named("cpu") == catalogue()["cpu"]
    assert not links.is_measured(tmp_path)
    told = CliRunner().invoke(app, ["calibrate", "--json", "--tiers", f"disk:{tmp_path}"])
    assert json.loads(told.stdout)["disturbed"]


def test_a_round_that_waits_for_its_core_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_LEAST_USED", 0.9)
    assert costs._best(lambda: time.sleep(0.002), 1).disturbed


def test_as_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", "--json", "--tiers", f"disk:{tmp_path}"])
    data = json.loads(result.stdout)
    assert data["links"]["disk"]["together"] > 0
    assert Path(data["path"]).is_file()


def test_a_damaged_machine_file_counts_as_absent(tmp_path: Path) -> None:
    CliRunner().invoke(app, ["calibrate", "--tiers", f"disk:{tmp_path}"])
    (path,) = (tmp_path / "cache" / "machine").glob("cpu.json")
    path.write_text(path.read_text().replace("cpu", "xpu"))
    assert machine_named("cpu") == catalogue()["cpu"]


def test_the_hosts_memory_is_no_tier_of_a_cpu() -> None:
    result = CliRunner().invoke(app, ["calibrate", "--tiers", "host"])
    assert result.exit_code == 2
    assert "memory of a CPU is the host's" in result.stderr


def test_where_there_is_a_card_its_link_to_the_host_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = FakeDevice(may_wait=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tiers, "host_tier", lambda: HostTier(fake))
    monkeypatch.setattr(links, "card", lambda: (torch.device("cpu"), "a fake", "8.0", 80 * 2**30))
    monkeypatch.setattr(host_link, "_PIECE_BYTES", 2**16)
    monkeypatch.setattr(host_link, "_SMALL_BYTES", 2**10)
    monkeypatch.setattr(costs, "open_tiers", lambda named, device: _opened(named, device, tmp_path))
    result = CliRunner().invoke(app, ["calibrate"])
    assert result.exit_code == 0, result.output
    assert "host       64.00 KiB out, 64.00 KiB back per second, both ways at once; measured here, on a fake" in (
        result.stdout
    )
    assert "through the page cache" in result.stdout, "the disk is measured as well"
    data = json.loads(CliRunner().invoke(app, ["calibrate", "--json", "--tiers", "host"]).stdout)
    assert set(data["links"]) == {"host"}
    assert data["links"]["host"]["out_bytes_per_second"] == 2**16
    assert links.measured_host_link(HostTier(fake))[0].out_bytes_per_second == 2**16, "later plans count on it"
    fake.run()


def _opened(named: list[Tier], device: str, directory: Path) -> dict[str, object]:
    """The tiers, a disk in ``directory``."""
    usable = [Tier(each.name, None if each.directory is None else directory) for each in named]
    return dict(tiers.open_tiers(usable, device))

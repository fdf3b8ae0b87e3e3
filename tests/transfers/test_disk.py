"""The disk tier: files that nobody sees, short transfers, full disks, directories that are none."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from ebbtide.errors import TierError, UsageError
from ebbtide.tiers import Tier, parse_tiers
from ebbtide.transfers.disk import DiskTier, Region, disk_tier, refuse_directory
from ebbtide.transfers.paths import MOST_FREE
from ebbtide.transfers.tiers import open_tiers


def test_what_is_written_comes_back_whatever_its_strides(tmp_path: Path):
    region = Region(tmp_path, 1 << 16)
    assert list(tmp_path.iterdir()) == []  # it has no name any more
    given = torch.randn(40, 30).t()
    taken = torch.empty_strided(given.shape, given.stride())
    region.write(4096, given)
    region.read(4096, taken)
    assert torch.equal(given, taken)
    region.close()
    region.close()


def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write, read = os.pwrite, os.preadv
    region = Region(tmp_path, 100_000)
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:7001], at))
    monkeypatch.setattr(os, "preadv", lambda file, views, at: read(file, [views[0][:4999]], at))
    given, taken = torch.randn(20_000), torch.empty(20_000)
    region.write(3, given)
    region.read(3, taken)
    assert torch.equal(given, taken)


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_transfer_that_ends_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str):
    region = Region(tmp_path, 4000)
    monkeypatch.setattr(os, call, lambda *_: 0)
    move = region.write if call == "pwrite" else region.read
    with pytest.raises(OSError, match="ended after 0 of 4000 bytes"):
        move(0, torch.zeros(1000))


def full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_said_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        TierError, match=r"could not be given 64\.00 MiB \(No space left on device; .* are free there\)"
    ) as caught:
        DiskTier(tmp_path).region(64 << 20)
    assert caught.value.path == tmp_path
    assert caught.value.tier == "disk"
    assert "Nothing of this step has run" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_the_disk_is_full_idle_regions_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier = DiskTier(tmp_path)
    idle = tier.region(1 << 20)
    tier.give_back(idle)
    allocate: Callable[..., None] = os.posix_fallocate

    def one_at_a_time(*args: int) -> None:
        if idle.close.alive:
            full()
        allocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", one_at_a_time)
    assert tier.region(32 << 20).size == 32 << 20


def test_regions_are_used_again_and_few_are_kept(tmp_path: Path):
    tier = DiskTier(tmp_path)
    first = tier.region(5 << 20)
    second = tier.region(5 << 20)
    assert first is not second
    tier.give_back(first)
    assert tier.region(5 << 20) is first
    assert tier.region(50 << 20) is not first
    before = len(os.listdir("/proc/self/fd"))
    many = [tier.region(1 << 20) for _ in range(10)]
    for each in many:
        tier.give_back(each)
    assert len(os.listdir("/proc/self/fd")) == before + MOST_FREE
    tier.give_up_free()
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_of_killed_processes_are_removed(tmp_path: Path):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    left, own, other = (tmp_path / name for name in (f"ebbtide-{child}-ab.tier", f"ebbtide-{os.getpid()}-ab.tier", "x"))
    for each in (left, own, other):
        each.touch()
    DiskTier(tmp_path).region(4096)
    assert sorted(tmp_path.iterdir()) == sorted([own, other])


def test_directories_that_are_none_are_refused(tmp_path: Path):
    with pytest.raises(TierError, match="is no directory"):
        refuse_directory(tmp_path / "nowhere")
    refuse_directory(tmp_path)
    in_memory = Path("/dev/shm")
    if in_memory.is_dir():
        with pytest.raises(TierError, match="lies in memory"):
            refuse_directory(in_memory)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(TierError, match="cannot be written to"):
        refuse_directory(tmp_path)


def test_a_directory_that_is_gone_is_an_error_with_its_name(tmp_path: Path):
    gone = tmp_path / "gone"
    with pytest.raises(TierError, match=r"no file can be made in .*gone"):
        Region(gone, 10)


@pytest.mark.parametrize(
    ("value", "names"),
    [(None, []), ([], []), ("host", ["host"]), ("disk", ["disk"]), (["host", "disk:/x"], ["host", "disk"])],
)
def test_tiers_are_named_by_words_or_lists(value: str | Sequence[str] | None, names: list[str]):
    assert [tier.name for tier in parse_tiers(value)] == names


def test_a_path_is_taken_as_it_is(tmp_path: Path):
    assert parse_tiers(f"disk:{tmp_path}") == (Tier("disk", tmp_path),)


@pytest.mark.parametrize("value", ["dsik", "disk:", "host:/x", 3, ["disk", "disk:/x"], [None], {"disk": 1}])
def test_other_names_are_refused(value: object):
    with pytest.raises(
        UsageError, match=r'tiers takes "host", "disk", "disk:PATH", a list of these, or None'
    ) as caught:
        parse_tiers(value)
    assert caught.value.argument == "tiers"


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("dsik", "'disk'"),
        ("/data/scratch", "'disk:/data/scratch'"),
        ("host,disk:/x", "['host', 'disk:/x']"),
        ("host, disk", "['host', 'disk']"),
    ],
)
def test_a_near_miss_is_named(value: str, meant: str):
    with pytest.raises(UsageError, match=re.escape(f"did you mean {meant}?")):
        parse_tiers(value)


def test_the_hosts_memory_is_no_tier_of_a_cpu():
    with pytest.raises(UsageError, match="memory of a CPU is the host's"):
        open_tiers(parse_tiers("host"), "cpu")


def test_one_directory_is_one_tier(tmp_path: Path):
    assert open_tiers(parse_tiers(f"disk:{tmp_path}"), "cpu")["disk"] is disk_tier(tmp_path)


def test_the_space_goes_with_the_last_who_has_the_tier(tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    tier = disk_tier(tmp_path)
    tier.give_back(tier.region(1 << 20))
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del tier
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_somebody_closed_is_no_error_in_the_end(tmp_path: Path):
    tier = DiskTier(tmp_path)
    region = tier.region(4096)
    os.close(region._file)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(OSError, match="Bad file descriptor"):
        region.write(0, torch.zeros(4))
    tier.give_back(region)
    assert tier.region(4096) is not region

"""Any defect of a cache is a miss: the step is measured and planned anew, and what cannot be written is not kept."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide import files
from ebbtide.cost import attach
from ebbtide.cost.cache import CostCache, device_context
from ebbtide.planning import cache as plan_cache

HUGE = 10**400


def seal(path: Path, data: object) -> None:
    """Write ``data`` as a cache would, whatever it says."""
    assert files.keep(path, path.with_name("lock"), lambda: data)  # type: ignore[arg-type, return-value]


def altered(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """All that a file says is changed and sealed again: nothing but its sense is wrong."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(each) for key, each in value.items()}
        if isinstance(value, list):
            return [walk(each) for each in value]
        return change(value)

    def do(path: Path) -> None:
        data = files.read_saved(path)
        assert data is not None
        seal(path, walk(data))

    return do


def number(new: object) -> Callable[[Any], Any]:
    return lambda value: new if isinstance(value, int | float) else value


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")


def a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def a_flipped_digit(path: Path) -> None:
    text = path.read_text()
    place = next(i for i in range(len(text) // 2, len(text)) if text[i].isdigit())
    path.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])


DEFECTS: dict[str, Callable[[Path], None]] = {
    "Infinity": altered(number(float("inf"))),
    "-Infinity": altered(number(float("-inf"))),
    "NaN": altered(number(float("nan"))),
    "10^400": altered(number(HUGE)),
    "-10^400": altered(number(-HUGE)),
    "2^63": altered(number(2**63)),
    "1e308": altered(number(1e308)),
    "-1": altered(number(-1)),
    "text for numbers": altered(number("seven")),
    "null for numbers": altered(number(None)),
    "lists for numbers": altered(number([1])),
    "null for text": altered(lambda value: None if isinstance(value, str) else value),
    "numbers for text": altered(lambda value: 7 if isinstance(value, str) else value),
    "truncated": lambda path: path.write_text(path.read_text()[:-40]),
    "half": lambda path: path.write_text(path.read_text()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_text(""),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 64),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "nested": lambda path: path.write_text("[" * 100_000),
    "no seal": lambda path: path.write_text(json.dumps({**(files.read_saved(path) or {})})),
    "a flipped digit": a_flipped_digit,
    "a list": lambda path: seal(path, {}) or path.write_text("[]"),
    "without keys": lambda path: seal(path, {"schema": "ebbtide-costs/4"}),
    "a directory": a_directory,
    "a loop of links": a_loop,
    "unreadable": lambda path: path.chmod(0),
}


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def gradients(budget: str | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(256, 16)
    if budget is not None:
        ebbtide.fit(model, budget, options=ebbtide.Options(effort=50))
    model(x).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def step_is_right() -> bool:
    """Whether a new process's first step, which knows nothing but the files, gives eager's bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach, "_KNOWN", {})
        patch.setattr(attach, "_TIMED", {})
        return all(torch.equal(a, b) for a, b in zip(gradients("75%"), gradients(None), strict=True))


def cached(directory: Path) -> list[Path]:
    return sorted(each for each in directory.rglob("*.json") if each.is_file())


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory with one file of costs and one of a plan."""
    directory = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        patch.setattr(plan_cache, "plans_directory", lambda: files.cache_directory() / "plans")
        assert step_is_right()
    assert len(cached(directory)) == 3  # costs, a plan, and by which rewrites it came about
    return directory


@pytest.fixture
def filled(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it that is in use."""
    directory = tmp_path / "filled"
    shutil.copytree(first, directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    monkeypatch.setattr(plan_cache, "plans_directory", lambda: files.cache_directory() / "plans")
    return directory


@pytest.mark.parametrize("name", ["Infinity", "NaN", "10^400", "2^63", "truncated", "a directory"])
def test_a_step_does_not_see_a_defect(name: str, filled: Path) -> None:
    for path in cached(filled):
        DEFECTS[name](path)
    assert step_is_right()
    assert not list(filled.rglob("*.tmp"))


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_a_miss(name: str, filled: Path) -> None:
    costs = CostCache(device_context("cpu"))
    choice, plan = sorted((files.cache_directory() / "plans").glob("*.json"), key=lambda each: len(each.name))[::-1]
    assert costs.load()
    assert plan_cache.CachedAnswer.from_json(files.read_saved(plan) or {})
    for path in (costs.path, plan, choice):
        DEFECTS[name](path)
    if name == "unreadable" and os.geteuid() == 0:
        return  # root can read all
    assert costs.load() == {}
    found = files.read_record(plan, plan_cache._SCHEMA, plan_cache.CachedAnswer.from_json)
    assert found is None or name in ("2^63", "1e308")  # which only who takes the plan can judge


@pytest.mark.parametrize("where", ["the directory is a file", "the locks are directories", "no such device"])
def test_a_cache_that_cannot_be_is_none(where: str, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "the directory is a file":
        place = filled / "file"
        place.write_text("kept")
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    elif where == "the locks are directories":
        for path in [*cached(filled)]:
            path.unlink()
        for lock in [*filled.rglob("*.lock")]:
            lock.unlink()
            lock.mkdir()
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert step_is_right()


@pytest.mark.parametrize("fails", ["write", "replace", "open"])
@pytest.mark.parametrize(
    "why", [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken"), KeyboardInterrupt()], ids=repr
)
def test_a_write_that_fails_leaves_no_draft_and_the_old_file(
    fails: str, why: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "costs.json", tmp_path / "lock"
    assert files.keep(path, lock, lambda: {"a": 1})

    def fail(*_: object, **__: object) -> Any:
        raise why

    if fails == "write":
        plain = os.fdopen

        def opened(descriptor: int, *_: object, **__: object) -> Any:
            plain(descriptor).close()
            return open("/dev/full", "wb") if getattr(why, "errno", 0) == errno.ENOSPC else fail()

        monkeypatch.setattr("ebbtide.files.os.fdopen", opened)
    else:
        monkeypatch.setattr(f"ebbtide.files.os.{fails}", fail)
    try:
        assert not files.keep(path, lock, lambda: {"a": 2})
    except KeyboardInterrupt:
        assert isinstance(why, KeyboardInterrupt)
    monkeypatch.undo()
    assert files.read_saved(path) == {"a": 1}
    assert not list(tmp_path.glob("*.tmp"))


def test_drafts_of_killed_processes_go(tmp_path: Path) -> None:
    old, young = tmp_path / "x.json.0.tmp", tmp_path / "y.json.0.tmp"
    for each in (old, young):
        each.write_text("half")
    os.utime(old, (1, 1))
    assert files.keep(tmp_path / "x.json", tmp_path / "lock", dict)
    assert young.exists()
    assert not old.exists()


WRITER = """
import sys
from pathlib import Path
from ebbtide import files
path = Path(sys.argv[1])
print("on", flush=True)
for n in range(int(sys.argv[2])):
    saved = lambda: files.read_saved(path) or {}
    files.keep(path, path.with_name("lock"), lambda: {**saved(), f"{sys.argv[3]}.{n}": "x" * 2000})
"""


def writer(path: Path, count: int, name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(count), name], stdout=subprocess.PIPE)


def test_a_writer_that_is_killed_leaves_a_whole_file_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    process = writer(path, 10**6, "a")
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    before = files.read_saved(path)
    assert before
    assert files.keep(path, path.with_name("lock"), lambda: {**before, "b": 1})
    assert files.read_saved(path) == {**before, "b": 1}


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    processes = [writer(path, 5, str(n)) for n in range(4)]
    for each in processes:
        each.communicate(timeout=120)
        assert each.returncode == 0
    assert len(files.read_saved(path) or {}) == 20

"""Files that Ebbtide writes: whole or not at all, and readable for whom the user's umask says."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.files import write_json


@pytest.fixture(params=[0o022, 0o077, 0o002, 0o027])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no umask")
def test_a_file_has_the_permissions_that_open_would_give(umask: int, tmp_path: Path) -> None:
    with (tmp_path / "oracle").open("w"):
        pass
    write_json(tmp_path / "ours.json", {"a": 1})
    ours, oracle = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours.json", "oracle"))
    assert ours == oracle == 0o666 & ~umask


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory to write to") as missing:
        write_json(tmp_path / "none" / "plan.json", [1])
    assert missing.value.filename == str(tmp_path / "none")


def test_an_old_file_is_replaced_and_no_draft_is_left(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, [1])
    write_json(path, [2])
    assert json.loads(path.read_text()) == [2]
    assert os.listdir(tmp_path) == ["plan.json"]


def test_what_is_no_json_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, [1])
    with pytest.raises(TypeError):
        write_json(path, [object()])
    assert json.loads(path.read_text()) == [1]
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_json(tmp_path / "nowhere" / "plan.json", [1])

"""Files that Ebbflow keeps: where they are, and how they are written."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path

import platformdirs

__all__ = ["cache_directory", "write_json"]

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def cache_directory() -> Path:
    """Where Ebbflow keeps measured costs and plans: the user's cache directory."""
    return Path(platformdirs.user_cache_dir("ebbflow", appauthor=False))


def write_json(path: Path, data: object) -> None:
    """Write ``data`` to ``path`` as compact JSON; readers see the old file or the new one, never a part.

    The file has the permissions that the user's umask gives to any new file; ``tempfile`` would keep all others out.

    Raises:
        OSError: if the file cannot be written.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with os.fdopen(os.open(draft, _NEW_FILE, 0o666), "w", encoding="utf-8") as file:
            json.dump(data, file, separators=(",", ":"))
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise

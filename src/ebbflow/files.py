"""Files that Ebbflow keeps: where they are, and how they are written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import platformdirs

__all__ = ["cache_directory", "write_json"]


def cache_directory() -> Path:
    """Where Ebbflow keeps measured costs and plans: the user's cache directory."""
    return Path(platformdirs.user_cache_dir("ebbflow", appauthor=False))


def write_json(path: Path, data: object) -> None:
    """Write ``data`` to ``path`` as compact JSON; readers see the old file or the new one, never a part.

    Raises:
        OSError: if the file cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(data, file, separators=(",", ":"))
    os.replace(name, path)

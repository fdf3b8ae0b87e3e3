"""Files that Ebbtide keeps: where they are, and how they are written and read.

1. A file is written as a draft beside its place and takes it at once: readers see the old file or the new one, never a
   part. A draft goes when its writing fails; one whose process was killed goes when the next file is kept beside it.
2. A *kept* file is a cache's: a JSON object that ends with a digest of all before it. Whatever is wrong with it, from
   rights to a flipped bit, it counts as absent (:func:`kept`); one that cannot be written is not kept (:func:`keep`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import filelock
import platformdirs

__all__ = [
    "EntryFile",
    "cache_directory",
    "keep",
    "locked",
    "read_record",
    "read_saved",
    "write_bytes",
    "write_json",
    "write_text",
]

Record = TypeVar("Record")
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_DRAFT = ".tmp"
_ABANDONED_SECONDS = 3600.0  # no draft is written for so long
_LOCK_SECONDS = 10.0
_MOST_BYTES = 2**30  # larger than anything that is kept
_SEAL = ',"sha256":"'


def cache_directory() -> Path:
    """Where Ebbtide keeps measured costs and plans: the user's cache directory."""
    return Path(platformdirs.user_cache_dir("ebbtide", appauthor=False))


def write_json(path: Path, data: object) -> None:
    """Write ``data`` to ``path`` as compact JSON (definition 1).

    The file has the permissions that the user's umask gives to any new file; ``tempfile`` would keep all others out.

    Raises:
        OSError: if the file cannot be written.
    """
    write_text(path, json.dumps(data, separators=(",", ":")))


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, in the same way.

    Raises:
        OSError: if the file cannot be written.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, in the same way.

    Raises:
        OSError: if the file cannot be written.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory to write to", str(path.parent))
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}{_DRAFT}")
    try:
        with os.fdopen(os.open(draft, _NEW_FILE, 0o666), "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


# -- caches ---------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path, most_seconds: float = _LOCK_SECONDS) -> Generator[None]:
    """While open, no other process is in here with the same ``path``, whose folder is made if need be.

    Args:
        path: of a file that is there for nothing else.
        most_seconds: to wait for others; less than 0 is forever.

    Raises:
        OSError: if that cannot be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path, timeout=most_seconds)
    try:
        lock.acquire()
    except (filelock.Timeout, NotImplementedError) as error:
        raise OSError(f"{path} cannot be locked") from error
    try:
        yield
    finally:
        lock.release()


def keep(path: Path, lock: Path, data: Callable[[], dict[str, Any]], then: Callable[[], None] | None = None) -> bool:
    """Keep what ``data`` returns at ``path`` (definition 2), under ``lock``; whether that was done.

    Args:
        path: of the file.
        lock: file that all who write there take.
        data: called once the lock is taken.
        then: called before it is given back.
    """
    try:
        with locked(lock):
            _forget_drafts(path.parent)
            text = json.dumps(data(), separators=(",", ":"))
            write_text(path, f'{text[:-1]}{_SEAL}{_digest(text[:-1])}"}}')
            if then is not None:
                then()
    except OSError:
        return False
    return True


def read_saved(path: Path) -> dict[str, Any] | None:
    """What was kept at ``path``; ``None`` if there is nothing, or anything is wrong with it."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        text, seal, digest = path.read_text(encoding="utf-8").rpartition(_SEAL)
        if not seal or digest != f'{_digest(text)}"}}':
            return None
        data: object = json.loads(text + "}")
    except (OSError, ValueError, RecursionError, MemoryError):
        return None
    return cast("dict[str, Any]", data) if isinstance(data, dict) else None


def read_record(path: Path, schema: str, record: Callable[[dict[str, Any]], Record]) -> Record | None:
    """What ``record`` makes of what was kept at ``path``; ``None`` where it is of another schema, or no such record."""
    data = read_saved(path)
    try:
        return None if data is None or data["schema"] != schema else record(data)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError):
        return None


class EntryFile(Generic[Record]):
    """Entries by key, measured in one context, which all who know more add to.

    Args:
        context: all that an entry depends on besides its key.
        directory: of the file; the user's cache directory if ``None``.
    """

    name: str
    """Of the entries, in the file and as its own."""
    schema: str

    def __init__(self, context: Mapping[str, str], directory: Path | None = None) -> None:
        self._context = dict(context)
        digest = _digest(json.dumps(self._context, sort_keys=True))[:16]
        self.path = (directory or cache_directory()) / f"{self.name}-{digest}.json"

    def from_json(self, value: Any) -> Record:
        """The entry that :meth:`to_json` has written; raises where ``value`` is none."""
        raise NotImplementedError

    def to_json(self, entry: Record) -> object:
        """``entry`` as plain data."""
        return entry

    def load(self) -> dict[str, Record]:
        """All on disk by key; empty if there is no file of ours, or anything is wrong with it."""
        return read_record(self.path, self.schema, self._entries) or {}

    def _entries(self, data: dict[str, Any]) -> dict[str, Record]:
        ours: dict[str, Any] = data[self.name] if data["context"] == self._context else {}
        return {key: self.from_json(value) for key, value in ours.items()}

    def add(self, entries: Mapping[str, Record]) -> None:
        """Add ``entries`` to what is on disk; a file that cannot be written is left alone."""

        def merged() -> dict[str, Any]:
            every = {key: self.to_json(each) for key, each in {**self.load(), **entries}.items()}
            return {"schema": self.schema, "context": self._context, self.name: every}

        keep(self.path, self.path.with_name(f"{self.path.name}.lock"), merged)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _forget_drafts(folder: Path) -> None:
    """Remove what a process that was killed has left (definition 1)."""
    latest = time.time() - _ABANDONED_SECONDS
    for draft in folder.glob(f"*{_DRAFT}"):
        with contextlib.suppress(OSError):
            if draft.stat().st_mtime < latest:
                draft.unlink()

"""The disk tier: files without a name, written once when they are made, through the page cache.

1. A *region* is a file of its own for the copies of one step in flight. It is unlinked at once, so it goes with the
   process, however that ends; where a process was killed in between, the next one removes it.
2. A region is filled when it is made: the space is there, and the first write to fresh blocks, which takes ten times
   as long as later ones, does not happen in a step.
3. Regions that are free are used again, unless a copy failed in them. All regions of a directory share one lane, for
   both ways. They go with the last who has the tier: a fitted model, or a step of it in flight.
4. A process that was forked from makes regions of its own: both would write to the same blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import weakref
from collections.abc import Callable, Generator
from pathlib import Path

import torch

from ebbtide.errors import TierError
from ebbtide.transfers.lane import Job, Lane
from ebbtide.transfers.paths import Pool
from ebbtide.transfers.slots import Slot
from ebbtide.units import format_bytes

__all__ = ["DiskTier", "Region", "disk_tier", "free_bytes", "refuse_directory"]

_CHUNK_BYTES = 4 * 2**20
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


class Region:
    """A file for the copies of one step (definition 1).

    Args:
        directory: to make it in.
        size: bytes.

    Attributes:
        failed: whether something could not be written or read.

    Raises:
        TierError: if the file cannot be made that large.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self.size = size
        self.failed = False
        self._directory = directory
        path = directory / f"ebbtide-{os.getpid()}-{secrets.token_hex(8)}.tier"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TierError(
                f"no file can be made in {directory} ({error.strerror}); give another directory: "
                "tiers=['disk:PATH'], or make room for one there",
                tier="disk",
                path=directory,
            ) from None
        finally:  # also after Ctrl-C
            with contextlib.suppress(OSError):
                path.unlink()
        self.close = weakref.finalize(self, _close, self._file)
        self.close.atexit = False  # what else runs then may want to read, such as a checkpoint of the optimizer
        try:
            self._fill()
        except OSError as error:
            self.close()
            raise TierError(
                f"the disk tier in {directory} could not be given {format_bytes(size)} ({error.strerror}; "
                f"{format_bytes(free_bytes(directory))} are free there); free some space, give another directory "
                "(tiers=['disk:PATH']) or a larger budget. Nothing of this step has run",
                tier="disk",
                path=directory,
            ) from None

    def _fill(self) -> None:
        """Write the whole file once, so that the space is there (definition 2)."""
        if self.size:
            os.posix_fallocate(self._file, 0, self.size)
        zeros = bytes(min(_CHUNK_BYTES, self.size))
        for offset in range(0, self.size, _CHUNK_BYTES):
            chunk = memoryview(zeros)[: min(_CHUNK_BYTES, self.size - offset)]
            _write(self._file, chunk, offset)

    def write(self, offset: int, tensor: torch.Tensor, size: int | None = None) -> None:
        """Copy the storage of ``tensor``, or its first ``size`` bytes, to ``offset``.

        Raises:
            OSError: if it cannot be written.
        """
        with self._noted():
            _write(self._file, _memory_of(tensor)[:size], offset)

    def read(self, offset: int, tensor: torch.Tensor, size: int | None = None) -> None:
        """Fill the storage of ``tensor``, or its first ``size`` bytes, from ``offset`` on.

        Raises:
            OSError: if it cannot be read, or ends too early.
        """
        with self._noted():
            _read(self._file, _memory_of(tensor)[:size], offset)

    @contextlib.contextmanager
    def _noted(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError:
            self.failed = True
            raise

    def failure(self, what: str, why: str) -> TierError:
        """What to raise where a copy failed."""
        return TierError(
            f"{what} failed: {why}, in a file in {self._directory}. No gradient of this step was handed out. See to "
            "the disk, or give another directory: tiers=['disk:PATH']",
            tier="disk",
            path=self._directory,
        )


class DiskTier(Pool[Region]):
    """The regions of one directory.

    Args:
        directory: where files are made; it is there, and no memory (:func:`refuse_directory`).
    """

    name = "disk"
    always_timed = True

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.lane = Lane(f"disk {directory}")

    def _make(self, size: int) -> Region:
        _remove_abandoned(self.directory)
        return Region(self.directory, size)

    def give_back(self, region: Region) -> None:
        """Nobody uses ``region`` any more. May be called from a finalizer."""
        if region.failed:
            region.close()
        else:
            super().give_back(region)

    def send(self, region: Region, slot: Slot, tensor: torch.Tensor, then: Callable[[], None], *, timed: bool) -> Job:
        """Issue the copy of ``tensor`` to its slot."""
        return self.lane.submit(lambda: region.write(slot.offset, tensor), then)

    def fetch(
        self, region: Region, slot: Slot, tensor: torch.Tensor, out: Job, then: Callable[[], None], *, timed: bool
    ) -> Job:
        """Issue the way back of ``out`` into ``tensor``."""

        def read() -> None:
            out.wait()
            if out.failure:
                raise RuntimeError(out.failure)
            region.read(slot.offset, tensor)

        return self.lane.submit(read, then)


_tiers: weakref.WeakValueDictionary[Path, DiskTier] = weakref.WeakValueDictionary()


def disk_tier(directory: Path) -> DiskTier:
    """The tier of ``directory``, one per process (definition 3)."""
    return _tiers.setdefault(directory, DiskTier(directory))


def refuse_directory(directory: Path) -> None:
    """Refuse a directory that cannot be a tier.

    Raises:
        TierError: if it is none, cannot be written, or lies in memory.
    """
    if not directory.is_dir():
        raise TierError(f"{directory} is no directory; make it, or give another one", tier="disk", path=directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise TierError(f"{directory} cannot be written to; give another directory", tier="disk", path=directory)
    kind = _file_system_of(directory)
    if kind in _IN_MEMORY:
        raise TierError(
            f"{directory} is on a file system of type {kind}, which lies in memory: tensors that are moved there free "
            "nothing. Give a directory on a disk: tiers=['disk:PATH']",
            tier="disk",
            path=directory,
        )


def free_bytes(directory: Path) -> int:
    """What may be written in ``directory``; 0 if that cannot be told."""
    try:
        stat = os.statvfs(directory)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def _file_system_of(directory: Path) -> str:
    """Its type as the kernel names it; empty where there is no such table."""
    try:
        device = directory.stat().st_dev
        rows = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for row in rows:
        fields, _, rest = row.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return ""


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of its whole storage, in place."""
    storage = tensor.untyped_storage()
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _write(file: int, memory: memoryview, offset: int) -> None:
    """Write all of ``memory``: the system may write less at a time."""
    done = 0
    while done < len(memory):
        done += _moved(os.pwrite(file, memory[done:], offset + done), done, memory)


def _read(file: int, memory: memoryview, offset: int) -> None:
    """Fill all of ``memory``: the system may read less at a time."""
    done = 0
    while done < len(memory):
        done += _moved(os.preadv(file, [memory[done:]], offset + done), done, memory)


def _close(file: int) -> None:
    """Close it; where that fails, or somebody has closed it, nobody can do anything about it."""
    with contextlib.suppress(OSError):
        os.close(file)


def _moved(count: int, done: int, memory: memoryview) -> int:
    if count <= 0:
        raise OSError(errno.EIO, f"it ended after {done} of {len(memory)} bytes")
    return count


def _remove_abandoned(directory: Path) -> None:
    """Remove files of processes that were killed before they had unlinked them."""
    for path in directory.glob("ebbtide-*.tier"):
        owner = path.name.split("-")[1]
        if owner.isdecimal() and int(owner) != os.getpid() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):
                path.unlink()

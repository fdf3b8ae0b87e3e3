"""Bytes as nobody of ours counts them: a preloaded counter of the allocator's calls, and the kernel's ``VmHWM``.

1. The counter (``counter.c``) is compiled with whatever compiler there is, and preloaded by ``LD_PRELOAD``. It counts
   the bytes that libc10 asks for and has not given back. Its resolution is measured by blocks of known sizes.
2. ``VmHWM`` is the process's highest resident memory since it was last reset through ``/proc/self/clear_refs``. It
   sees whole pages that were touched, and everything that is no tensor as well, so it judges large models alone.
3. Budgets are held with :data:`SLACK_BYTES` of slack for single numbers that user code makes in the step, such as a
   scaled loss and its gradient. They belong to no model.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path

import torch

__all__ = ["SLACK_BYTES", "Counter", "build_counter", "hwm_bytes", "measured_resolution", "reset_hwm", "vm_bytes"]

SLACK_BYTES = 2**10
_SOURCE = Path(__file__).with_name("counter.c")
_COMPILERS = ("cc", "gcc", "clang")


def build_counter(folder: Path) -> tuple[Path | None, str]:
    """The shared object, or ``None`` and why there is none."""
    compiler = next((found for name in (os.environ.get("CC", ""), *_COMPILERS) if (found := shutil.which(name))), None)
    if compiler is None:
        return None, f"no C compiler ({', '.join(_COMPILERS)})"
    out = folder / "counter.so"
    command = [compiler, "-O2", "-fPIC", "-shared", "-o", str(out), str(_SOURCE), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None, f"{Path(compiler).name} failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}"
    return out, ""


class Counter:
    """The preloaded counter, if there is one (definition 1)."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self.present = hasattr(library, "counter_start")
        if self.present:
            for name in ("current", "peak", "lost", "allocations"):
                getattr(library, f"counter_{name}").restype = ctypes.c_long
            self.present = bool(library.counter_start())
        self._library = library

    @property
    def bytes(self) -> int:
        """Alive now."""
        return int(self._library.counter_current()) if self.present else 0

    @property
    def peak_bytes(self) -> int:
        """Highest since :meth:`reset`."""
        if not self.present:
            return 0
        assert not self._library.counter_lost(), "the counter's table is full"
        return int(self._library.counter_peak())

    def reset(self) -> None:
        if self.present:
            self._library.counter_reset()


@functools.cache
def counter() -> Counter:
    """The process's."""
    return Counter()


def measured_resolution() -> int:
    """The largest error of the counter, in bytes, over blocks of known sizes that come and go."""
    seen, start, worst, blocks = counter(), counter().bytes, 0, []
    for step in range(3000):
        blocks.append(torch.empty(1 + (step * 7919) % 5000, dtype=torch.uint8))
        if step % 3 == 2:
            del blocks[(step * 31) % len(blocks)]
        worst = max(worst, abs(seen.bytes - start - sum(block.nbytes for block in blocks)))
    seen.reset()
    before = seen.bytes
    del blocks[:]
    torch.empty(10_000_000, dtype=torch.uint8)
    return max(worst, abs(seen.peak_bytes - max(before, start + 10_000_000)))


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status: this oracle needs Linux")


def hwm_bytes() -> int:
    """Highest resident memory since :func:`reset_hwm`."""
    return _status("VmHWM")


def vm_bytes(name: str = "VmRSS") -> int:
    """Another line of ``/proc/self/status``."""
    return _status(name)


def reset_hwm() -> None:
    """Set ``VmHWM`` to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

"""What the process as a whole has taken, as the operating system counts it."""

from __future__ import annotations

import sys

try:
    import resource
except ImportError:  # Windows
    resource = None

__all__ = ["highest_bytes"]

_UNIT = 1 if sys.platform == "darwin" else 2**10


def highest_bytes() -> int:
    """The most resident memory that the process has ever had; 0 where it is not told. It takes a microsecond to ask."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT

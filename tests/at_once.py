"""Work that several threads do at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable


def at_once(count: int, work: Callable[[], object]) -> None:
    """Return when ``count`` threads have done ``work``."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

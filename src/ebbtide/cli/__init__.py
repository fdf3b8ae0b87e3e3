"""The command line's door. It imports almost nothing, so that Ctrl-C is answered in one line from the start.

All else is in ``ebbtide.cli.commands``, which ``main`` imports once it has laid its handler.
"""

import os
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.cli.commands import app as app

__all__ = ["app", "main"]  # pyright: ignore[reportUnsupportedDunderAll]

STOPPED = b"ebbtide: stopped by Ctrl-C while it started; there is no result yet\n"


def main() -> None:
    """The ``ebbtide`` command."""
    # An exception that comes up in the middle of an import has a long traceback, or is swallowed: end there and then.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)
    from ebbtide.cli.commands import app

    app(prog_name="ebbtide")


def _end_at_once(number: int, frame: object) -> None:
    """Until a command begins there is nothing to clean up. ``commands`` puts Python's own handler back then."""
    try:
        os.write(2, STOPPED)
    finally:
        os._exit(130)


def interruptible() -> None:
    """A command begins: from here on, Ctrl-C raises ``KeyboardInterrupt``."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'ebbtide.cli' has no attribute {name!r}")
    from ebbtide.cli.commands import app

    return app

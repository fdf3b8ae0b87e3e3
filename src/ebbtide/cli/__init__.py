"""The command line's door. It imports almost nothing, so that Ctrl-C is answered in one line from the start.

All else is in ``ebbtide.cli.commands``, which ``main`` imports once it has laid its handler.
"""

import signal
from typing import TYPE_CHECKING, Any

from ebbtide.cli.start import end_at_once

if TYPE_CHECKING:
    from ebbtide.cli.commands import app as app

__all__ = ["app", "main"]  # pyright: ignore[reportUnsupportedDunderAll]


def main() -> None:
    """The ``ebbtide`` command."""
    # An exception that comes up in the middle of an import has a long traceback, or is swallowed: end there and then.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    from ebbtide.cli.commands import app

    app(prog_name="ebbtide")


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'ebbtide.cli' has no attribute {name!r}")
    from ebbtide.cli.commands import app

    return app

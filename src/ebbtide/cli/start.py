"""Ctrl-C while the command line starts: one line and an end, with next to nothing imported."""

import os
import signal

__all__ = ["STOPPED", "end_at_once", "interruptible"]

STOPPED = b"ebbtide: stopped by Ctrl-C while it started; there is no result yet\n"


def end_at_once(number: int, frame: object) -> None:
    """A handler until a command begins: there is nothing to clean up before that."""
    try:
        os.write(2, STOPPED)
    finally:
        os._exit(130)


def interruptible() -> None:
    """A command begins: from here on, Ctrl-C raises ``KeyboardInterrupt``."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)

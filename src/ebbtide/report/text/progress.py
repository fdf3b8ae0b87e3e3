"""What a long command is doing: one line that changes on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

from ebbtide.planners.base import Progress
from ebbtide.planners.narration import interrupted_at

__all__ = ["ProgressDisplay"]

PLAIN_SECONDS = 5.0  # between two plain lines of what a planner tells: a log should not scroll


class _Ticking:
    """The line of a display as it is at the moment that it is drawn."""

    def __init__(self, display: ProgressDisplay) -> None:
        self._display = display

    def __rich__(self) -> Text:
        return Text(self._display.line)


class ProgressDisplay:
    """Shows stages and what a planner tells; Ctrl-C that ends them gets a note of what was shown last.

    Args:
        stream: written to; a terminal gets one changing line, anything else a line per stage and one in five seconds.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        console = Console(file=stream)
        self._begin = time.monotonic()
        self._text = ""
        self._status = Status(_Ticking(self), console=console) if console.is_terminal else None
        self._last: Progress | None = None
        self._last_text: str = ""
        self._last_seconds = -PLAIN_SECONDS

    def __enter__(self) -> ProgressDisplay:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
        if isinstance(error, KeyboardInterrupt) and self._last is not None:
            interrupted_at(error, self._last)

    @property
    def line(self) -> str:
        """What goes on, and for how long it has by now."""
        seconds = time.monotonic() - self._begin
        return (
            f"{self._text} ({f'{seconds:.0f} s' if seconds < 60 else f'{seconds / 60:.1f} min'})" if self._text else ""
        )

    def stage(self, text: str) -> None:
        """Say what is done now."""
        self._last_seconds = -PLAIN_SECONDS
        self(Progress(text))

    def __call__(self, progress: Progress) -> None:
        """Show what a planner tells."""
        self._last = progress
        text = str(progress)
        elapsed = time.monotonic() - self._begin
        if self._status is not None:
            self._text = text  # what is drawn looks here, several times a second
            return
        if text == self._last_text or elapsed - self._last_seconds < PLAIN_SECONDS:
            return
        self._last_text, self._last_seconds = text, elapsed
        print(f"{elapsed:6.1f} s  {text}", file=self._stream, flush=True)

"""Lines for a terminal end between words, at its width; a file, a pipe or a notebook gets them as they are."""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import TextIO, cast

__all__ = ["on_terminal", "wrapped"]

_LABEL = re.compile(r" *\S+(?: \S+)* {2,}")
"""What stands before a line's words: a name, and the spaces that put them in columns."""
_TO_COPY = "  try: "
"""Begins a command, which stays one line."""
_NARROW = 40
"""Columns below which lines are left to the terminal."""


class _Wrapping:
    """A terminal that gets whole lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        width = shutil.get_terminal_size().columns
        self._stream.write("\n".join(wrapped(line, width) for line in text.split("\n")))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def on_terminal(stream: TextIO) -> TextIO:
    """``stream``, or if it is a terminal one that breaks whole lines for it between words."""
    return cast(TextIO, _Wrapping(stream)) if stream.isatty() else stream


def wrapped(line: str, width: int) -> str:
    """``line`` in lines of at most ``width`` columns, the later ones under its words; no word is cut."""
    if len(line) <= width or width < _NARROW or line.startswith(_TO_COPY):
        return line
    label = _LABEL.match(line)
    indent = label.end() if label is not None else len(line) - len(line.lstrip()) + 2
    under = " " * (indent if indent <= width // 2 else 4)
    lines = textwrap.wrap(line, width, subsequent_indent=under, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)

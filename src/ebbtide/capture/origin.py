"""Where a node comes from in the user's code: source line and module path, for messages and reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import fx

from ebbtide.torch_seams.graphs import module_stack_of, stack_trace_of

__all__ = ["SourceLine", "line_of", "module_of", "place_of", "source_of"]

_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\S+))?')
_STEP = re.compile(r"L\['\w+'\]\.?|(?:__dict__\['_modules'\]|_modules)\['(\w+)'\]")
"""What Dynamo writes of one module on the way; of one that its owner looks up itself (PEFT) in ``__dict__``."""
_TORCH = str(Path(torch.__file__).parent)
_LONG, _WORDS = 80, 14  # of code
_CAPTURE = str(Path(__file__).parent)


class SourceLine(NamedTuple):
    """A line of the user's: ``file:line``, and in words with its code; both empty if it is not known."""

    source: str
    text: str

    @property
    def shown(self) -> str:
        """The words, without the end of a long line of code."""
        place, colon, code = self.text.partition(": ")
        words = code.split(" ")
        if len(code) > _LONG:
            words = code[:_LONG].split(" ")[:-1]
        kept = " ".join(words[:_WORDS])
        return self.text if kept == code else f"{place}{colon}{kept} ..."


def place_of(trace: str, frame: re.Match[str]) -> SourceLine:
    """The line of one frame in a ``trace`` as Python prints it; ``frame`` matches file, line and perhaps function."""
    line, _, rest = trace[frame.end() :].partition("\n")
    code = rest.partition("\n")[0].strip()
    words = frame[0] + line.strip()
    return SourceLine(f"{Path(frame[1]).name}:{frame[2]}", f"{words}: {code}" if code else words)


def line_of(node: fx.Node) -> SourceLine:
    """The innermost frame outside torch that issued ``node``, or any frame but the capture's own without one."""
    trace = stack_trace_of(node)
    frames = [each for each in _FRAME.finditer(trace) if not each[1].startswith(_CAPTURE)]
    user = [each for each in frames if not each[1].startswith(_TORCH)] or frames
    return place_of(trace, user[-1]) if user else SourceLine("", "")


def source_of(node: fx.Node) -> str:
    """``file:line`` of the innermost frame outside torch, of any frame but the capture's own without one, or ``""``."""
    return line_of(node).source


def module_of(node: fx.Node) -> str:
    """Path of the innermost module whose forward issued the node, or ``""``."""
    paths = [path for path, _ in module_stack_of(node).values()]
    if not paths:
        return ""
    return _STEP.sub(lambda m: m[1] or "", paths[-1]).strip(".")

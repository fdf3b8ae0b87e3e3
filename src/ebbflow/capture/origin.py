"""Where a node comes from in the user's code: source line and module path, for messages and reports."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import fx

from ebbflow.torch_seams.graphs import module_stack_of, stack_trace_of

__all__ = ["module_of", "source_of"]

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_STEP = re.compile(r"L\['\w+'\]\.?|(?:__dict__\['_modules'\]|_modules)\['(\w+)'\]")
"""What Dynamo writes of one module on the way; of one that its owner looks up itself (PEFT) in ``__dict__``."""
_TORCH = str(Path(torch.__file__).parent)
_CAPTURE = str(Path(__file__).parent)


def source_of(node: fx.Node) -> str:
    """``file:line`` of the innermost frame outside torch, of any frame but the capture's own without one, or ``""``."""
    frames = _FRAME.findall(stack_trace_of(node))
    frames = [f for f in frames if not f[0].startswith(_CAPTURE)]
    user = [f for f in frames if not f[0].startswith(_TORCH)] or frames
    return f"{Path(user[-1][0]).name}:{user[-1][1]}" if user else ""


def module_of(node: fx.Node) -> str:
    """Path of the innermost module whose forward issued the node, or ``""``."""
    paths = [path for path, _ in module_stack_of(node).values()]
    if not paths:
        return ""
    return _STEP.sub(lambda m: m[1] or "", paths[-1]).strip(".")

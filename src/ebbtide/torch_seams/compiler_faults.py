"""What fails in torch's compiler itself, told as the compiler tells other failures: with the user's lines.

Dynamo wraps what goes wrong while it traces, with the lines that it was at, but for failed assertions of its own, which
it raises bare. Relied on: what traces a function is an ``InstructionTranslatorBase``, which says where it is.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator

from ebbtide.faults import innermost

__all__ = ["told_with_its_lines"]

_BEGINS = "/torch/_dynamo/convert_frame.py"


def told_with_its_lines(error: Exception) -> Exception | None:
    """``error`` as Dynamo wraps others, if it came out of the compiler and of nobody's code that it called."""
    from torch._dynamo.exc import InternalTorchDynamoError

    frames = list(_frames(error))
    if not any(file.endswith(_BEGINS) for file, *_ in frames) or innermost(error) is not None:
        return None
    lines = [
        f'  File "{file}", line {line}, in {name}\n    {linecache.getline(file, line).strip()}'
        for file, line, name in _traced(error)
    ]
    text = f"{type(error).__name__}: {error}"
    if lines:
        text = "\n".join([text, "", "from user code:", *lines])
    found = InternalTorchDynamoError(text)
    found.__cause__ = error
    return found


def _frames(error: BaseException) -> Iterator[tuple[str, object]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_frame.f_locals.get("self")
        trace = trace.tb_next


def _traced(error: BaseException) -> list[tuple[str, int, str]]:
    """File, line and name of each function that was being traced, outermost first, each once."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    found: dict[int, tuple[str, int, str]] = {}
    for _, tracer in _frames(error):
        if isinstance(tracer, InstructionTranslatorBase):
            code = tracer.f_code
            found[id(tracer)] = (code.co_filename, tracer.lineno, code.co_name)
    return list(found.values())

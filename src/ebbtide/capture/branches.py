"""Which branch of a model is captured that asks whether it is compiled: eager's, wherever that is a graph.

A model may go one way where it is compiled and another in eager (``torch.compiler.is_compiling()``), with results that
differ in the last bits. So:
1. A capture is first tried with eager's answer at every site that asks (``torch_seams.eager_answers``).
2. Where that is no graph, the site that asked last before the break is told that it is compiled, and the capture is
   tried again: such a question mostly stands before what cannot be compiled.
3. Where that gets no further, every site is told so. If that is no graph either, its break is the one to tell of:
   what lies behind a question is out of the way.
4. An exception of the model's own ends the first try, as it would end eager's call; it says nothing in a later one.
   What a signal's handler raises ends any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ebbtide.errors import CaptureError, EbbtideError, InternalError
from ebbtide.signals import raised_by_a_handler
from ebbtide.torch_seams.eager_answers import Answers

__all__ = ["on_eagers_branches"]

_MOST_TRIES = 8
_Result = TypeVar("_Result")


def on_eagers_branches(attempt: Callable[[], _Result], answers: Answers) -> _Result:
    """What ``attempt`` returns or raises under the first answers that make the step a graph.

    Args:
        attempt: captures under ``answers``; may be called again where it raised.
        answers: changed for every further try.
    """
    first: EbbtideError | None = None
    said = ""
    for tries in range(_MOST_TRIES):
        answers.last = None
        try:
            return attempt()
        except (CaptureError, InternalError) as error:
            if answers.last is None:
                raise
            stuck = str(error) == said
            first, said = first or error, str(error)
        except Exception as error:
            if first is None or isinstance(error, EbbtideError) or raised_by_a_handler(error):
                raise
            if answers.everywhere:
                raise first from first.__cause__
            stuck = True
        if stuck or answers.last is None or tries == _MOST_TRIES - 2:
            answers.everywhere = True
        else:
            answers.compiled.add(answers.last)
    raise AssertionError("a site was told that it is not compiled, and all are told that they are")

"""What else in the process a capture may fail of: another thread's traces, and torch's own state.

``torch.export`` and ``torch.fx`` change the whole process while they trace: functions of theirs lie on
``torch.nn.Module``, and an export replaces composite operators and functions of Python's builtins as well. What another
thread captures meanwhile may end in any error of torch's; so may an export beside a capture. Compilations wait for each
other by themselves.

In some ten thousand captures two have failed in code of torch's that no code of a model can reach, and which no second
capture of the same call has met: at an assertion about the state of fake tensors (that their mode is not inside a
kernel), and while a view was described (as if functionalization were not suspended for it). So a capture that ends at
an assertion of torch's own, or in what would be told as a fault of ours, is made once more, with nothing remembered of
earlier ones. A fault that is there again is told as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ebbtide.errors import CaptureError, InternalError
from ebbtide.faults import RAISED_IN_CAPTURE
from ebbtide.signals import raised_by_a_handler
from ebbtide.torch_seams.compile_mode import others_tracing
from ebbtide.torch_seams.dynamo import failed_by_itself
from ebbtide.torch_seams.fake_tensors import forget_descriptions

__all__ = ["undisturbed"]

_Result = TypeVar("_Result")
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.005


def undisturbed(attempt: Callable[[], _Result]) -> _Result:
    """What ``attempt``, a capture, returns or raises, begun when no other thread traces or after a minute.

    It is made again if it failed at an assertion of torch's own, or by a fault of ours.

    Raises:
        CaptureError: if it failed, and another thread traced before or after.
    """
    end = time.monotonic() + _PATIENCE_SECONDS
    while (beside_others := others_tracing()) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    try:
        return _attempted_again(attempt)
    except Exception as error:
        theirs = any(note.startswith(RAISED_IN_CAPTURE) for note in getattr(error, "__notes__", ()))
        if theirs or raised_by_a_handler(error) or not (beside_others or others_tracing()):
            raise
        what = error.__cause__ or error if isinstance(error, InternalError) else error  # its advice is not to the point
        raise CaptureError(
            "another thread exports models or traces them with torch.fx, which changes torch for the whole process; "
            f"the capture beside it failed with {type(what).__name__}: {what}",
            remedy="call the fitted model once before that thread begins, or when it is done",
        ) from error


def _attempted_again(attempt: Callable[[], _Result]) -> _Result:
    try:
        return attempt()
    except InternalError:
        pass
    except CaptureError as error:
        if not failed_by_itself(error):
            raise
    forget_descriptions()
    return attempt()

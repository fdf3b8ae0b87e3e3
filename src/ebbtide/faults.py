"""Faults of our own, told apart from the user's: an exception that our code raised without meaning to.

An exception is *ours* if the innermost frame of its traceback lies in this package, frames of the standard library and
of the packages that we call left out; the zoo and the demo are models like any user's.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from ebbtide.errors import EbbtideError, InternalError
from ebbtide.signals import raised_by_a_handler

__all__ = [
    "RAISED_IN_CAPTURE",
    "forget_frames",
    "in_own_frames",
    "innermost",
    "internal",
    "is_own",
    "own_faults",
    "users_level",
]

RAISED_IN_CAPTURE = "Raised while the step was captured"
"""How the note begins that an exception of the user's own model gets."""

_HERE = Path(__file__).parent
_OURS = f"{_HERE}/"
_MODELS = (f"{_HERE / 'zoo'}/", f"{_HERE / 'demo'}/")
_COMPILER = "/torch/_dynamo/convert_frame.py"  # where it begins with a frame
_PATCHES = f"{_HERE / 'torch_seams' / 'patches.py'}"
_STANDARD = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
_PACKAGES = {"highspy", "numba", "numpy", "ortools", "platformdirs", "sympy", "torch"}  # models are in none of them


def forget_frames(error: BaseException, outside: BaseException | None = None) -> None:
    """Let go of what the frames hold that ``error`` has passed, and those of the errors that it came of.

    But for those of ``outside``, which was being handled before, and of what that came of: they are the user's.

    A frame that holds the error, in a list of refusals say, is in a cycle with it, which keeps what all of them hold
    (the arguments of a call) until the garbage collector comes.
    """
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and each is not outside and id(each) not in seen:
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__


def is_own(error: BaseException) -> bool:
    """Whether ``error`` came out of our own code."""
    place = innermost(error)
    return place is not None and _is_ours(place[0])


def innermost(error: BaseException) -> tuple[str, int] | None:
    """File and line of the innermost frame that ``error`` passed and that is ours or the user's.

    What called torch's compiler has no part in what goes wrong in it; what the compiler calls has. Nor has a patch
    part in what goes wrong in the function that it stands for.
    """
    found: tuple[str, int] | None = None
    before: list[tuple[str, int] | None] = []  # each patch that is being passed
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        file = code.co_filename
        if file == _PATCHES and code.co_name == "gate":
            before.append(found)
            found = file, trace.tb_lineno
        elif file == _PATCHES and code.co_name == "below":
            found = before.pop() if before else None  # or of an instruction of the compiler's
        elif file.endswith(_COMPILER):
            found = None
        elif _is_ours(file) or not _is_called(file):
            found = file, trace.tb_lineno
        trace = trace.tb_next
    return found


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS) and not file.startswith(_MODELS)


def _is_called(file: str) -> bool:
    """Whether ``file`` is generated, of the standard library, or of a package that we call."""
    parts = Path(file).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts[:-1]:
            return parts[parts.index(folder) + 1] in _PACKAGES
    return file.startswith(("<", *_STANDARD))


def users_level() -> int:
    """``stacklevel`` of a warning that the caller gives: the innermost frame of the user's code."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and (_is_ours(frame.f_code.co_filename) or _is_called(frame.f_code.co_filename)):
        frame, level = frame.f_back, level + 1
    return level


def internal(error: BaseException) -> InternalError:
    """``error`` as the fault that it is; raise it from ``error``."""
    text = str(error)
    return InternalError(f"{type(error).__name__}{f': {text}' if text else ''}")


def in_own_frames(error: BaseException) -> TracebackType | None:
    """The traceback of ``error`` without the frames of others, so that what it says stands near its last line."""
    frames: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_OURS):
            frames.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for each in reversed(frames):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


@contextmanager
def own_faults() -> Generator[None, None, None]:
    """What goes wrong in our own code inside is raised as :class:`~ebbtide.errors.InternalError`.

    What the user's code or the handler of a signal raises passes as it is, as do full disks and memory.
    """
    try:
        yield
    except (EbbtideError, OSError, MemoryError):
        raise
    except Exception as error:
        if is_own(error) and not raised_by_a_handler(error):
            raise internal(error) from error
        raise

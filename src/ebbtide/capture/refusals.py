"""Why a call could not be captured, in the user's terms: from what torch raised to one error of ours.

What goes wrong in a capture is one of these, looked for in this order:
1. an error of ours that torch wrapped: it is raised as it was, without torch's frames;
2. a size or a number that only the data tell: the model asks for something that no plan can have;
3. a statement that is known to break graphs (``known_breaks``);
4. a fault of our own code, an :class:`~ebbtide.errors.InternalError` and never advice to change the model; or of the
   user's code, or of torch's, while the compiler ran;
5. anything else that Dynamo says: its reason at the user's line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import torch

from ebbtide.capture.known_breaks import FREES_GRAPH, known_break
from ebbtide.capture.origin import SourceLine, place_of
from ebbtide.errors import CaptureError, EbbtideError, told
from ebbtide.faults import in_own_frames, innermost, internal, is_own
from ebbtide.torch_seams.dynamo import inner_exception

__all__ = ["frees_its_graph", "ours_inside", "refusal", "tells_torchs", "users_line"]

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_PYTHON = str(Path(os.__file__).parent)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\S+))?')
_CALLED = re.compile(
    r"(?:builtin operator|the builtin) `(?:<unknown module>\.)?(?P<builtin>[\w.]+?)\.?`"
    r"|method `(?P<method>\w+)` of class `(?P<kind>\w+)`"
    r"|function `(?P<function>[\w.]+)`(?: in file `[^`]*`)? should not be traced"
)
"""What torch's compiler could not follow, in its own words."""
_FIRST, _LAST = 8, 10  # words of what else it says
_USER_CODE = re.compile(r"from user code:|User Stack \(most recent call last\):|User stack trace:")

# Told apart by name, so that this module needs none of torch's private ones.
_DATA_DEPENDENT = {
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GuardOnDataDependentSymNode",
    "PendingUnbackedSymbolNotFound",
}
# Where torch hides the cause: its words for it, or a symbol for a size that only data tell (u0, u1, ...).
_TELLS_DATA = re.compile(rf"data-dependent expression|{'|'.join(sorted(_DATA_DEPENDENT))}|\bu\d+\b")
_COMPILER = {"BackendCompilerFailed", "InternalTorchDynamoError"}

_PLAN_WHOLE = (
    "Take the statement out of the model's forward, or do it before the call and give the forward what comes of it: "
    "plans are of whole steps only"
)
_BACKWARD_HOOK = (
    "Put the hook on the fitted model itself, or on a tensor of its forward (tensor.register_hook): a captured step "
    "runs no hooks between its submodules in the backward"
)
_FIXED_SIZES = (
    "Keep all rows and leave out of the loss with a mask (torch.where) what does not count, or pad outside the model; "
    "give sizes, and places in lists, to the forward as Python ints, not as tensors"
)
_TRACED = (
    "Code of yours (a custom op's fake kernel, an autograd function) failed on the fake tensors with which the step is "
    "traced: they have shapes and no values"
)
_INSIDE_TORCH = (
    "PyTorch itself failed on this step, which fails under torch.compile(fullgraph=True) as well: see whether another "
    "release of torch has it, or report it to PyTorch with the error that this one was raised from"
)


def ours_inside(error: BaseException) -> EbbtideError | None:
    """The error of ours that Dynamo wrapped, if it did; its traceback has our own frames alone."""
    for each in _chain(error):
        if isinstance(each, EbbtideError):
            return each.with_traceback(in_own_frames(each))
    return None


def refusal(error: BaseException, module: torch.nn.Module, ours: tuple[str, str] | None = None) -> EbbtideError:
    """What to raise for ``error``, which is none of ours.

    Args:
        error: torch's.
        module: whose call it is.
        ours: what we know better than Dynamo: why the call cannot be captured, and what would work.
    """
    place = _place(error)
    if ours is not None:
        return _capture_error(place, *ours)
    known = known_break(str(error), place.text if place is not None else "", module)
    if known is not None:
        return _capture_error(place, *known)
    chain = list(_chain(error))
    if any(type(each).__name__ in _DATA_DEPENDENT for each in chain) or _TELLS_DATA.search(str(error)):
        said = "" if place is not None else f" {_what(error)}"  # in symbols, which the line says better
        return _capture_error(place, f"A size or a number that it needs depends on data.{said}", _FIXED_SIZES)
    if type(error).__name__ not in _COMPILER:
        if "backwards hooks require" in str(error):
            return _capture_error(place, "A backward hook is on one of its submodules.", _BACKWARD_HOOK)
        return _capture_error(place, _what(error), _PLAN_WHOLE)
    cause = chain[-1]
    if is_own(cause):
        fault = internal(cause)
        fault.__cause__ = cause
        return fault
    if (theirs := innermost(cause)) is not None:
        at = SourceLine(f"{Path(theirs[0]).name}:{theirs[1]}", f'File "{theirs[0]}", line {theirs[1]}')
        return _capture_error(at, _what(error), _TRACED)
    return _capture_error(place, _what(error), _INSIDE_TORCH)


def tells_torchs(found: EbbtideError) -> bool:
    """Whether torch's own error says more than ``found``, which was made of it."""
    return getattr(found, "remedy", "") in (_INSIDE_TORCH, _TRACED, _PLAN_WHOLE)


def frees_its_graph(error: EbbtideError) -> TypeGuard[CaptureError]:
    """Whether ``error`` is that a gradient inside of the call frees the graph of what the call returns."""
    return isinstance(error, CaptureError) and error.remedy == FREES_GRAPH[1]


def users_line(error: BaseException) -> str:
    """The user's line with its code, as torch tells it; empty if it does not."""
    place = _place(error)
    return place.text if place is not None else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it wraps, outermost first."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = inner_exception(each) or each.__cause__


def _capture_error(place: SourceLine | None, why: str, remedy: str) -> CaptureError:
    at = f"  {place.shown}" if place is not None else ""
    return CaptureError(
        f"{place.text}. {why}" if place is not None else why,
        remedy=remedy,
        source=place.source if place is not None else "",
        message=told(f"the step cannot be captured as one graph. {why}", remedy, at),
    )


def _place(error: BaseException) -> SourceLine | None:
    """The innermost line of the user's that torch names, or of any code but ours if it names none of the user's."""
    for each in _chain(error):
        text = str(each)
        start = _USER_CODE.search(text)
        if start is None:
            continue
        frames = list(_FRAME.finditer(text, start.end()))
        frames = [frame for frame in frames if not frame[1].startswith(_OURS)]
        mine = [frame for frame in frames if not _is_pythons_or_torchs(frame[1])] or frames
        if mine:
            return place_of(text, mine[-1])
    return None


def _is_pythons_or_torchs(file: str) -> bool:
    return file.startswith(_TORCH) or (file.startswith(_PYTHON) and "-packages" not in file[len(_PYTHON) :])


def _what(error: BaseException) -> str:
    """What torch says is wrong, without its internals; ends with a full stop."""
    said = str(error)
    if (called := _CALLED.search(said)) is not None:
        name = called["builtin"] or called["function"] or f"{called['kind']}.{called['method']}"
        return f"It calls {name}, which becomes part of no graph."
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    inner = inner_exception(error)
    if inner is not None:
        first = str(inner).strip().partition("\n")[0]
        what = f"{type(inner).__name__}: {first}"
    else:
        what = lines[0] if lines else type(error).__name__
    details = [line for line in lines[1:8] if re.match(r"Explanation: .", line)]
    words = " ".join([f"{what.rstrip('.')}.", *details[:1]]).split()
    return " ".join(words if len(words) <= _FIRST + _LAST else [*words[:_FIRST], "...", *words[-_LAST:]])

"""Whose compilation it is: what this thread captures, what somebody else compiles or exports, and under which stance.

Torch says whether something is being compiled, and how calls of compiled functions are to be taken, for the whole
process. Here both are facts of a thread.
"""

from __future__ import annotations

import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import _guards
from torch.fx import _symbolic_trace
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

from ebbtide.signals import raised_by_a_handler
from ebbtide.torch_seams.compiling_flag import while_nobody_steps
from ebbtide.torch_seams.frames import Frames
from ebbtide.torch_seams.patches import Attribute, Patch, wrapped

__all__ = [
    "NO_FRAMES",
    "NotCompiled",
    "OwnCompileMode",
    "capturing",
    "code_of_compiled",
    "constant_in_traces",
    "exporting_here",
    "left_out_of_traces",
    "not_exporting",
    "others_tracing",
    "traces",
    "tracing_here",
]


def tracing_here() -> bool:
    """Whether this thread compiles or exports something; ``torch.compiler.is_compiling`` speaks for the process."""
    return _guards.TracingContext.try_get() is not None


def exporting_here() -> bool:
    """Whether this thread exports a model, traces it for ``torch.jit`` or ``torch.fx``, or calls it on fake tensors.

    Nothing is trained then.
    """
    if torch.compiler.is_exporting():  # in some thread
        return tracing_here() or _guards.detect_fake_mode() is not None
    if _fx_traces_here():
        return not tracing_here()
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None and not tracing_here()


def _fx_traces_here() -> bool:
    """Whether ``torch.fx`` traces on this thread; its flag is up in compilations too.

    The flag speaks for the process up to 2.13 and for the thread from 2.14 on, where a function tells it.
    """
    flag = getattr(_symbolic_trace, "_get_is_fx_tracing", lambda: _symbolic_trace._is_fx_tracing_flag)
    if not flag():
        return False
    tracing = torch.fx.Tracer.trace.__code__
    frame = sys._getframe()
    while frame is not None and frame.f_code is not tracing:
        frame = frame.f_back
    return frame is not None


_EXPORT = str(Path(torch.__file__).parent / "export" / "_trace.py")
_TRACE = torch.fx.Tracer.trace.__code__


def others_tracing() -> bool:
    """Whether another thread exports a model, or traces one with ``torch.fx``, by where its stack stands.

    The flags that both put up speak for the process, and an export changes more than it has its flag up for.
    """
    here = threading.get_ident()
    return any(traces(frame) for thread, frame in sys._current_frames().items() if thread != here)


def traces(frame: types.FrameType | None) -> bool:
    """Whether a stack is inside of an export or of ``torch.fx.Tracer.trace``."""
    while isinstance(frame, types.FrameType):  # of a thread that runs on, f_back may be no frame at all
        if frame.f_code is _TRACE or frame.f_code.co_filename == _EXPORT:
            return True
        frame = frame.f_back
    return False


_COMPILATION = re.compile(r"^(None|[\d/]+): ")
_LONG = 160  # of a guard's text


NO_FRAMES = "found no compiled frames"
"""What torch says of a function of ``fullgraph=True`` that it did not look at, as under a dispatch mode."""


class NotCompiled(RuntimeError):
    """No compiled code of a function has guards that hold for this call."""


_Stance = Callable[[Any, types.CodeType], Any]


@dataclass
class _Ours:
    """A call of a compiled function under a stance of ours.

    Attributes:
        code: of the function.
        mode: the stance.
        asked: whether torch has asked for it.
        as_written: whether fitted models in it run as they are written, since they are parts of what is captured.
    """

    code: types.CodeType
    mode: _Stance
    asked: bool = False
    as_written: bool = False


class _Here(threading.local):
    call: _Ours | None = None


_here = _Here()
_patches: weakref.WeakValueDictionary[str, Patch] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


class OwnCompileMode:
    """Calls of functions of ``torch.compile`` on this thread that heed no stance, or compile nothing.

    Torch's stances hold for the whole process: under ``fail_on_recompile`` what somebody else compiles in another
    thread fails, and under a user's ``force_eager`` a step would run as it is written. While an object of this class
    lives, what asks for the stance of a thread's calls (``eval_frame._callback_from_stance``) passes through here, and
    so does what asks whether ``torch.fx`` traces (``is_fx_symbolic_tracing``), for a compiled function refuses calls
    while some thread does: a function has to be given to ``torch.compile`` while an object of this class lives.
    """

    def __init__(self) -> None:
        from torch._dynamo import eval_frame

        stance = Attribute(eval_frame, "_callback_from_stance")
        traces = Attribute(_symbolic_trace, "is_fx_symbolic_tracing")
        with _sharing:
            self._patches = [_shared(stance, _by_thread), _shared(traces, _tracing_by_thread)]

    def compiling(self, function: Callable[..., Any], *args: Any) -> Any:
        """What ``function`` returns, compiled first if nothing that is compiled holds."""
        return self._under(_as_it_is, function, args)

    def only_compiled(self, function: Callable[..., Any], *args: Any) -> Any:
        """What ``function`` returns.

        Raises:
            NotCompiled: if it had to be compiled first; nothing of it has run.
        """
        return self._under(_refusing, function, args)

    def in_pieces(self, function: Callable[..., Any], *args: Any, frames: Frames) -> Any:
        """What ``function`` returns, whose graph may break: every frame that begins is compiled (``frames``)."""
        return self._under(frames.compiling, function, args, as_written=True)

    def why_not_compiled(self, function: Callable[..., Any], *args: Any) -> str:
        """The guard that keeps compiled code from this call, and the user's line that it comes from, if Dynamo says.

        To be called where :meth:`only_compiled` has just raised.
        """
        try:
            self._under(_explaining, function, args)
        except NotCompiled as error:
            guard, _, line = str(error).strip().partition("\n")[0].partition("  #")
            guard, line = (each.strip()[:_LONG] for each in (_COMPILATION.sub("", guard), line.partition("  #")[0]))
            return f"{guard} ({line})" if line else guard
        return ""

    def _under(
        self, mode: _Stance, function: Callable[..., Any], args: tuple[Any, ...], *, as_written: bool = False
    ) -> Any:
        # Dynamo leaves a function alone under such a mode. It would run as it is; 2.13 says so then, 2.11 does not.
        if any_torch_dispatch_mode_on_stack():
            raise RuntimeError(f"torch.compile {NO_FRAMES}: a dispatch mode is active")
        as_written = as_written or mode is _as_it_is
        before, _here.call = _here.call, _Ours(code_of_compiled(function), mode, as_written=as_written)
        try:
            return function(*args)
        finally:
            _here.call = before


def code_of_compiled(function: Callable[..., Any]) -> types.CodeType:
    """The code of what was given to ``torch.compile``."""
    return function._torchdynamo_orig_callable.__code__  # type: ignore[attr-defined, no-any-return]


def _shared(place: Attribute, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Patch:
    """The one patch of a place, which is open for as long as somebody keeps it."""
    found = _patches.get(place.name)
    if found is None:
        _patches[place.name] = found = wrapped(place, make, lasting=True).open()
    return found


def _tracing_by_thread(found: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: found() and _fx_traces_here()


@contextmanager
def not_exporting() -> Iterator[None]:
    """While open, nothing is being exported as far as this thread can tell: what is, is somebody else's.

    ``torch.compile`` hands back a function as it is while any thread of the process exports.
    """
    if not torch.compiler.is_exporting():
        yield
        return
    with wrapped(Attribute(torch.compiler, "is_exporting"), lambda _: lambda: False, this_thread=True):
        yield


def _by_thread(found: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def callback_from_stance(callback: Any) -> Any:
        call = _here.call
        if call is None or callback is None or callback is False:
            return found(callback)
        if not call.asked:
            call.asked = True
            return call.mode(callback, call.code)
        # A compiled function of somebody's inside of ours: a part of the step while that is captured.
        return callback if call.mode is _as_it_is else found(callback)

    return callback_from_stance


def capturing() -> bool:
    """Whether this thread captures a step of ours, or runs one in pieces."""
    return _here.call is not None and _here.call.as_written


def constant_in_traces(function: Callable[[], Any]) -> Callable[[], Any]:
    """``function`` itself, which a trace calls at once and takes the result of (``assume_constant_result``)."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def left_out_of_traces(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """``function``, at which every trace of Dynamo ends; ``reason`` is what an error says where none may end."""
    return torch.compiler.disable(function, reason=reason)  # type: ignore[no-any-return]


# Every frame that begins while a compiled function runs is shown to what compiles: those of finalizers as well, which
# the garbage collector may call at any time. None but the frame of the function itself is ours.


def _for(code: types.CodeType, callback: Any, compile_frame: Callable[..., Any]) -> Callable[..., Any]:
    """What Dynamo asks to compile a frame, and what finds what ``callback`` has compiled; others' frames just run."""
    from torch._C._dynamo.eval_frame import _FrameAction as Action
    from torch._C._dynamo.eval_frame import _FrameExecStrategy as Strategy
    from torch._dynamo.types import ConvertFrameReturn

    as_it_is = Strategy(Action.SKIP, Action.SKIP)

    def compile_own(frame: Any, *args: Any, **kwargs: Any) -> Any:
        if frame.f_code is not code:
            return ConvertFrameReturn(frame_exec_strategy=as_it_is, apply_to_code=False)
        return compile_frame(frame, *args, **kwargs)

    compile_own._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]
    return compile_own


def _as_it_is(callback: Any, code: types.CodeType) -> Callable[..., Any]:
    def compiled(frame: Any, *args: Any, **kwargs: Any) -> Any:
        with while_nobody_steps():
            return callback(frame, *args, **kwargs)

    return _for(code, callback, compiled)


def _refusing(callback: Any, code: types.CodeType) -> Callable[..., Any]:
    """Refuse to compile."""

    def refuse(frame: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotCompiled("no compiled code has guards that hold for this call")

    return _for(code, callback, refuse)


def _explaining(callback: Any, code: types.CodeType) -> Callable[..., Any]:
    """Refuse with the guards that failed as the reason."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.guards import get_guard_fail_reason_helper

    def refuse(frame: Any, *args: Any, **kwargs: Any) -> Any:
        reasons: list[str] = []
        for entry in _debug_get_cache_entry_list(frame.f_code):
            try:
                reasons.append(get_guard_fail_reason_helper(entry.guard_manager, frame.f_locals, None, None))
            except Exception as error:  # of an entry whose guards are gone nobody can say more
                if raised_by_a_handler(error):
                    raise
        raise NotCompiled("; ".join(reasons))

    return _for(code, callback, refuse)

"""Whose compilation it is: what this thread captures, what somebody else compiles or exports, and under which stance.

Torch says whether something is being compiled, and how calls of compiled functions are to be taken, for the whole
process. Here both are facts of a thread.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import _guards

from ebbflow.torch_seams.patches import Attribute, Patch, wrapped

__all__ = [
    "NotCompiled",
    "OwnStance",
    "capturing",
    "constant_in_traces",
    "exporting_here",
    "left_out_of_traces",
    "tracing_here",
]


def tracing_here() -> bool:
    """Whether this thread compiles or exports something; ``torch.compiler.is_compiling`` speaks for the process."""
    return _guards.TracingContext.try_get() is not None


def exporting_here() -> bool:
    """Whether this thread exports a model or traces it for ``torch.jit``: nothing is trained then."""
    if torch.compiler.is_exporting():  # in some thread
        return tracing_here() or _guards.detect_fake_mode() is not None
    return bool(torch.jit.is_tracing())  # pyright: ignore[reportPrivateImportUsage]


_COMPILATION = re.compile(r"^(None|[\d/]+): ")
_LONG = 160  # of a guard's text


class NotCompiled(RuntimeError):
    """No compiled code of a function has guards that hold for this call."""


class _Here(threading.local):
    stance: Callable[[Any], Any] | None = None


_here = _Here()
_patches: weakref.WeakValueDictionary[str, Patch] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


class OwnStance:
    """Calls of functions of ``torch.compile`` on this thread that heed no stance, or compile nothing.

    Torch's stances hold for the whole process: under ``fail_on_recompile`` what somebody else compiles in another
    thread fails, and under a user's ``force_eager`` a step would run as it is written. While an object of this class
    lives, what asks for the stance of a thread's calls (``eval_frame._callback_from_stance``) passes through here.
    """

    def __init__(self) -> None:
        from torch._dynamo import eval_frame

        with _sharing:
            found = _patches.get("stance")
            if found is None:
                found = wrapped(Attribute(eval_frame, "_callback_from_stance"), _by_thread, lasting=True).open()
                _patches["stance"] = found
        self._patch = found

    def compiling(self, function: Callable[..., Any], *args: Any) -> Any:
        """What ``function`` returns, compiled first if nothing that is compiled holds."""
        return self._under(_as_it_is, function, args)

    def only_compiled(self, function: Callable[..., Any], *args: Any) -> Any:
        """What ``function`` returns.

        Raises:
            NotCompiled: if it had to be compiled first; nothing of it has run.
        """
        return self._under(_refusing, function, args)

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

    def _under(self, stance: Callable[[Any], Any], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        before, _here.stance = _here.stance, stance
        try:
            return function(*args)
        finally:
            _here.stance = before


def _by_thread(found: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def callback_from_stance(callback: Any) -> Any:
        if _here.stance is None or callback is None or callback is False:
            return found(callback)
        return _here.stance(callback)

    return callback_from_stance


def capturing() -> bool:
    """Whether this thread captures a step of ours."""
    return _here.stance is _as_it_is


def constant_in_traces(function: Callable[[], Any]) -> Callable[[], Any]:
    """``function`` itself, which a trace calls at once and takes the result of (``assume_constant_result``)."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def left_out_of_traces(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """``function``, at which every trace of Dynamo ends; ``reason`` is what an error says where none may end."""
    return torch.compiler.disable(function, reason=reason)  # type: ignore[no-any-return]


def _as_it_is(callback: Any) -> Any:
    return callback


def _refusing(callback: Any) -> Callable[..., Any]:
    """What Dynamo asks to compile a frame, refusing every one; it finds what ``callback`` has compiled."""

    def refuse(frame: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotCompiled("no compiled code has guards that hold for this call")

    refuse._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]
    return refuse


def _explaining(callback: Any) -> Callable[..., Any]:
    """Like :func:`_refusing`, with the guards that failed as the reason."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.guards import get_guard_fail_reason_helper

    def refuse(frame: Any, *args: Any, **kwargs: Any) -> Any:
        reasons: list[str] = []
        for entry in _debug_get_cache_entry_list(frame.f_code):
            with suppress(Exception):  # of an entry whose guards are gone nobody can say more
                reasons.append(get_guard_fail_reason_helper(entry.guard_manager, frame.f_locals, None, None))
        raise NotCompiled("; ".join(reasons))

    refuse._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]
    return refuse

"""The frames of the user's that a step in pieces compiles: under which settings, and what of one is not.

Torch keeps what it has compiled of a frame on the code object, for everybody who runs that code: another fitted model
of the same class, the user's own ``torch.compile``. Its limit counts all of it, so that ours is counted from what
others have, and goes with the model.
"""

from __future__ import annotations

import enum
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.torch_seams.compiling_flag import while_nobody_steps

__all__ = ["STEP", "Frame", "Frames", "Then"]

STEP = "ebbtide_step"
"""How the names of functions begin that are captured."""
_OURS = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Frame:
    """A frame that is compiled.

    Attributes:
        place: its function, file and line.
        others: how many graphs of its code are kept for others.
        fixed: whether its sizes are numbers.
    """

    place: str
    others: int
    fixed: bool


class Then(enum.Enum):
    """What becomes of a frame whose compilation has failed."""

    RAISE = enum.auto()
    AS_IN_EAGER = enum.auto()
    """Now and later; what it calls is compiled."""
    WITH_FIXED_SIZES = enum.auto()


class Frames:
    """The frames that the steps of one model compile.

    Args:
        settings: opened around the compilation of each frame; code between graphs runs outside of them.
        failed: what becomes of a frame whose compilation raises.
    """

    def __init__(
        self, settings: Callable[[Frame], AbstractContextManager[Any]], failed: Callable[[Exception, Frame], Then]
    ) -> None:
        self._settings, self._failed = settings, failed
        self.codes: weakref.WeakSet[types.CodeType] = weakref.WeakSet()
        """Of which something is compiled."""
        self._in_eager: set[types.CodeType] = set()
        self._fixed: set[types.CodeType] = set()

    def compiling(self, callback: Any, _: types.CodeType) -> Callable[..., Any]:
        """What Dynamo asks to compile a frame: every one but those of our own code."""
        from torch._C._dynamo.eval_frame import _FrameAction as Action
        from torch._C._dynamo.eval_frame import _FrameExecStrategy as Strategy
        from torch._dynamo.types import ConvertFrameReturn

        as_it_is, without_it = Strategy(Action.SKIP, Action.SKIP), Strategy(Action.SKIP, Action.DEFAULT)
        backend = _innermost(callback)

        def compile_frame(frame: Any, *args: Any, **kwargs: Any) -> Any:
            code: types.CodeType = frame.f_code
            if code.co_filename.startswith(_OURS) and not code.co_name.startswith(STEP):
                return ConvertFrameReturn(frame_exec_strategy=as_it_is, apply_to_code=False)
            made = None
            while made is None and code not in self._in_eager:
                found = Frame(
                    f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})",
                    _of_others(code, backend),
                    code in self._fixed,
                )
                self.codes.add(code)
                try:
                    with self._settings(found), while_nobody_steps():
                        made = callback(frame, *args, **kwargs)
                except Exception as error:
                    then = self._failed(error, found)
                    if then is Then.RAISE:
                        raise
                    (self._fixed if then is Then.WITH_FIXED_SIZES else self._in_eager).add(code)
            if made is None or made.frame_exec_strategy.cur_action == Action.RUN_ONLY:  # at the limit of one frame
                return ConvertFrameReturn(frame_exec_strategy=without_it, apply_to_code=False)
            return made

        compile_frame._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]
        return compile_frame


def _innermost(callback: Any) -> Any:
    """What torch keeps with compiled code to tell whose it is."""
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    return callback


def _of_others(code: types.CodeType, backend: Any) -> int:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return sum(each.backend is not backend for each in _debug_get_cache_entry_list(code))

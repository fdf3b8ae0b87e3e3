"""Code that asks whether it is compiled gets eager's answer while a step is captured.

1. The *questions* are torch's: ``torch.compiler.is_compiling`` and its kin (:func:`_questions`). A *site* is where one
   is asked: file and line of the code that calls it, and of what called that, to :data:`_FRAMES` in all.
2. Every site gets eager's answer, ``False``, but for those that :class:`Answers` name, which get the compiler's. Code
   of torch's own always does: that is how torch is traced.
3. Whether a device's stream is being captured is asked beside them, in code that is never reached where the compiler's
   answer is given: none is.
4. The answer is this thread's own and that of one capture: what others compile meanwhile hears what it always did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import _utils

from ebbtide.torch_seams.patches import Item, patched, wrapped

__all__ = ["Answers", "Site", "answered"]

Site = tuple[tuple[str, int], ...]
"""Files and lines, innermost first (definition 1)."""

_FRAMES = 3  # libraries ask through helpers of theirs, mostly one or two
_TORCH = f"{Path(torch.__file__).parent}/"


@dataclass
class Answers:
    """What code is told that asks whether it is compiled.

    Attributes:
        compiled: sites that are told so.
        everywhere: whether all are.
        last: the site that was told last that it is not; ``None`` if none was.
    """

    compiled: set[Site] = field(default_factory=set[Site])
    everywhere: bool = False
    last: Site | None = None

    def at(self, site: Site) -> bool:
        """What ``site`` is told."""
        if self.everywhere or site in self.compiled:
            return True
        self.last = site
        return False


@contextmanager
def answered(answers: Answers) -> Iterator[None]:
    """While open, captures of this thread give ``answers`` (definitions 2 to 4)."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    with ExitStack() as stack:
        for question in _questions():
            make = functools.partial(_answering, answers)
            stack.enter_context(wrapped(Item(handlers, question), make, this_thread=True))
        for question in (torch.cuda.is_current_stream_capturing, torch.xpu.is_current_stream_capturing):
            place = Item(handlers, question)
            stack.enter_context(wrapped(place, _no_stream, this_thread=True, default=lambda *_, **__: None))
            stack.enter_context(patched(Item(get_torch_obj_rule_map(), question), TorchInGraphFunctionVariable))
        yield


def _questions() -> list[Callable[[], bool]]:
    """Torch's functions, which Dynamo answers by handlers of ``tracing_state_functions``.

    Dynamo says ``True`` to ``is_exporting`` as well up to torch 2.12.
    """
    return [
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
        torch.compiler.is_exporting,
        torch._dynamo.external_utils.is_compiling,  # pyright: ignore[reportDeprecated]
        _utils.is_compiling,  # pyright: ignore[reportDeprecated]
    ]


def _answering(answers: Answers, below: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.variables import ConstantVariable

    def handle(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        answer = below(variable, tx, *args, **kwargs)
        if tx.f_code.co_filename.startswith(_TORCH) or answers.at(_site(tx)):
            return answer
        return ConstantVariable.create(False)

    return handle


def _site(tx: Any) -> Site:
    found: list[tuple[str, int]] = []
    while tx is not None and len(found) < _FRAMES:
        found.append((tx.f_code.co_filename, tx.lineno))
        tx = tx.parent
    return tuple(found)


def _no_stream(_below: Callable[..., Any]) -> Callable[..., Any]:
    """Answer that no stream is captured (definition 3).

    Dynamo asks torch, which may be built without CUDA, or traces no such question (XPU).
    """
    from torch._dynamo.variables import ConstantVariable

    return lambda *_, **__: ConstantVariable.create(False)

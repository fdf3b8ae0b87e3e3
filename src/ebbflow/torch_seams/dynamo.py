"""Dynamo: from Python to one graph. Imported where it is used, for it takes as long to import as all of torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._dynamo.eval_frame import reset_code

from ebbflow.torch_seams.patches import Item, Setting, patched, wrapped

__all__ = ["capture_error_type", "forget_compiled", "inner_exception", "one_graph_settings", "sizes_as_symbols"]

_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")  # what maybe_mark_dynamic leaves on a tensor


def capture_error_type() -> type[Exception]:
    """What every error of Dynamo is: its own refusals, and wrapped ones of the user's code and of backends."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def inner_exception(error: BaseException) -> BaseException | None:
    """The exception that an error of Dynamo wraps, if it wraps one."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) and inner is not error else None


def forget_compiled(function: Callable[..., Any]) -> None:
    """Free what Dynamo keeps for a function of ``torch.compile``, which it would keep until the process ends.

    Its cache hangs on the code object of the function that was compiled (``_torchdynamo_orig_callable``).
    """
    reset_code(function._torchdynamo_orig_callable.__code__)  # type: ignore[attr-defined]


def _ignored_messages() -> set[Any]:
    """Logging and warnings, which a captured step leaves out: they would break its graph. ``print`` is refused."""
    levels = ("debug", "info", "warning", "error", "critical", "exception", "log")
    logger = [getattr(logging.Logger, name) for name in dir(logging.Logger) if name in levels or name.endswith("_once")]
    return {warnings.warn, *logger}  # asked anew: libraries add methods (transformers' warning_once)


@contextmanager
def one_graph_settings() -> Iterator[None]:
    """While open, this thread's captures have sizes that are numbers, no messages, and recurrent modules.

    - ``automatic_dynamic_shapes`` off and ``assume_static_by_default`` on: a size is a number unless it is marked; an
      automatic dynamic shape has no bytes.
    - ``ignore_logger_methods``: calls that are left out of the graph instead of breaking it. Torch 2.11 sorts them
      when it logs a compilation's metrics, cannot, and logs an error of 20 lines for each capture.
    - ``skip_nnmodule_hook_guards`` off: a hook that is put on a submodule later makes another step.
    - ``enable_dynamo_decompositions`` off: ``addcmul_``, ``addcdiv_`` and ``add_`` with a factor stay one operator. The
      handler that takes ``torch.addcdiv`` apart asks no setting, so it hands the call on.
    - ``allow_rnn``: without it Dynamo refuses the recurrent modules that ``capture/rules/recurrent.py`` unrolls.
    """
    from torch._dynamo import config
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    values = {
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "ignore_logger_methods": _ignored_messages(),
        "enable_dynamo_decompositions": False,
        "allow_rnn": True,
        "skip_nnmodule_hook_guards": False,
    }
    with ExitStack() as stack:
        for name, value in values.items():
            if hasattr(config, name):  # enable_dynamo_decompositions is newer than 2.11
                stack.enter_context(patched(Setting(config, name), value))
        if torch.addcdiv in handlers:
            stack.enter_context(wrapped(Item(handlers, torch.addcdiv), _not_handled, this_thread=True))
        yield


def _not_handled(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


@contextmanager
def sizes_as_symbols(tensors: Iterable[torch.Tensor], dimensions: Iterable[Iterable[int]]) -> Iterator[None]:
    """While open, a capture takes some sizes of these tensors as symbols, unless something makes them numbers.

    Args:
        tensors: arguments of the call to be captured.
        dimensions: per tensor, which of its sizes.
    """
    from torch._dynamo import maybe_mark_dynamic

    marked = list(tensors)
    ours = [(tensor, mark) for tensor in marked for mark in _MARKS if not hasattr(tensor, mark)]
    try:
        for tensor, changing in zip(marked, dimensions, strict=True):
            for dimension in changing:
                maybe_mark_dynamic(tensor, dimension)
        yield
    finally:
        for tensor, mark in ours:
            if hasattr(tensor, mark):
                delattr(tensor, mark)

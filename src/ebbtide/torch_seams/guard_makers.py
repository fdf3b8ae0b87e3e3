"""Guards of our own in Dynamo's captures: what a trace has read of Python's objects is asked again at later calls.

Each is a Python function among the root's guards, which gets the locals of the call. Objects are found again by where
Dynamo found them (a *source*); what has no source is held weakly where that is possible.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._guards import TracingContext

from ebbtide.errors import InternalError

__all__ = ["PLAIN", "Held", "add_guard", "can_change", "finder", "guard_anywhere", "guard_at", "of_this_trace"]

_ASKED = "_ebbtide_asked"  # of a trace: what it has guards for
PLAIN = (str, int, bool, float, bytes, type(None))
"""What is the same if it is equal."""


def guard_at(
    source: Any,
    kind: str,
    says: str,
    check_of: Callable[[Any], Callable[[Any], bool]],
) -> None:
    """Guard the value at ``source``, once for each ``kind``.

    Args:
        source: where Dynamo finds the value.
        kind: of the guard.
        says: it in words.
        check_of: makes the check from the value of now.
    """
    from torch._dynamo.guards import install_guard

    if not _is_new((source.name, kind)):
        return

    def install(builder: Any, guard: Any) -> None:
        check, find = check_of(builder.get(guard)), finder(source.name, builder.scope["G"])
        add_guard(builder, guard, lambda in_locals: check(find(in_locals)), f"{says}: {source.name}")

    install_guard(source.make_guard(install))


def finder(name: str, in_globals: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Finds among the locals of a call what Dynamo calls ``name``.

    Dynamo's own tree of guards takes no check of a dictionary whose keys it guards, and goes past parts of objects that
    have not been written to as it sees it.
    """
    from torch._dynamo import guards

    found: Callable[[Mapping[str, Any]], Any] = eval(
        compile(f"lambda L: {name}", "<ebbtide: guard>", "eval"), {**guards._get_closure_vars(), "G": in_globals}
    )
    return found


def guard_anywhere(kind: object, says: str, check: Callable[[Mapping[str, Any], Mapping[str, Any]], bool]) -> None:
    """Guard what has no source of its own; ``check`` gets the call's locals and globals."""
    from torch._dynamo.guards import install_guard
    from torch._dynamo.source import GlobalStateSource

    if not _is_new(kind):
        return

    def install(builder: Any, guard: Any) -> None:
        in_globals = builder.scope["G"]
        add_guard(builder, guard, lambda in_locals: check(in_locals, in_globals), says)

    install_guard(GlobalStateSource().make_guard(install))


def add_guard(builder: Any, guard: Any, check: Callable[[Mapping[str, Any]], bool], says: str) -> None:
    """Add ``check`` of the locals of a call.

    Raises:
        InternalError: if the call that is captured does not meet it: its place is not found again, or the trace has
            changed what is there. Without it the step would go on with what it has read, and with it none would run.
    """
    safe = _safely(check)
    if not safe(builder.scope["L"]):
        from torch._dynamo.exc import Unsupported

        fault = InternalError(f"what the forward has read of Python's objects cannot be asked again later: {says}")
        raise Unsupported(str(fault)) from fault  # any other is wrapped by Dynamo, and its cause is lost
    add = builder.guard_manager.root.add_epilogue_lambda_guard  # which is asked when all others hold
    try:
        add(safe, [says], guard.user_stack)
    except TypeError:  # of releases that keep no line with a guard
        add(safe, [says])


def _safely(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """``check`` of what may be something else by now."""

    def safe(value: Any) -> bool:
        try:
            return check(value)
        except Exception:
            return False

    return safe


def _is_new(kind: object) -> bool:
    """Whether this trace has not asked for such a guard yet."""
    if (asked := of_this_trace(_ASKED)) is None or kind in asked:
        return False
    asked[kind] = None
    return True


def of_this_trace(name: str) -> dict[Any, Any] | None:
    """What a trace of this thread has noted under ``name``; ``None`` where there is no trace."""
    context = TracingContext.try_get()
    return None if context is None else vars(context.guards_context).setdefault(name, {})


def can_change(source: Any) -> bool:
    """Whether Dynamo can find something again, and it is no constant of the code."""
    from torch._dynamo.source import is_constant_source, is_from_skip_guard_source

    return source is not None and not is_constant_source(source) and not is_from_skip_guard_source(source)


class Held:
    """A key or a value to be known again: plain ones by what they equal, others weakly where that is possible.

    Args:
        value: what is held.
    """

    __slots__ = ("_ref", "_value")

    def __init__(self, value: Any) -> None:
        self._value, self._ref = value, None
        if not isinstance(value, PLAIN):
            try:
                self._value, self._ref = None, weakref.ref(value)
            except TypeError:
                self._value = value

    def get(self) -> Any:
        """The value; ``None`` if it is gone."""
        return self._value if self._ref is None else self._ref()

    def is_now(self, value: Any) -> bool:
        """Whether ``value`` is the same, or of the same type and equal."""
        here = self.get()
        if here is value:
            return True
        return type(here) is type(value) and not isinstance(value, torch.Tensor) and bool(here == value)

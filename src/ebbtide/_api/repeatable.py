"""``repeatable``: ops of other libraries that may run again."""

from __future__ import annotations

import re
from typing import TypeVar

import torch

from ebbtide.capture.traits import declare_repeatable
from ebbtide.errors import UsageError
from ebbtide.names import with_known_keywords

__all__ = ["repeatable"]

OpT = TypeVar("OpT")
_NAME = re.compile(r"(\w+)(?:::|\.)(\w+)")


@with_known_keywords
def repeatable(op: OpT) -> OpT:
    """Declare that an op of another library gives the same bits whenever it is given the same; returns ``op``.

    Nobody can look into an op that was registered by ``torch.library`` (``custom_op``, ``define``), so each runs once
    in a step and what it makes is kept until its last reader. One that draws no random numbers, counts nothing and adds
    up in one order may run again instead. The first step proves it: a buffer that comes back with other bits raises
    ``VerificationError``. Declare it before the model is fitted; it holds for the process.

    Args:
        op: what ``torch.library.custom_op`` gave, an op of ``torch.ops``, or its name, ``"namespace::name"``.

    Raises:
        UsageError: for what is no op.
    """
    found = _NAME.search(str(op))  # "ns::name", "ns.name.overload", "<CustomOpDef(ns::name)>"
    namespace, own = found.groups() if found is not None else ("", "")
    if not hasattr(getattr(torch.ops, namespace or "none"), own or "none"):
        raise UsageError(
            f"repeatable takes an op that is registered (what torch.library.custom_op gave, an op of torch.ops, or its "
            f'name, "namespace::name"), not {op!r}',
            argument="op",
            value=op,
        )
    declare_repeatable(f"{namespace}::{own}")
    return op
